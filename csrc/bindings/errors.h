// Maps the exceptions of core/error.h to the classes of dyno.errors.
#pragma once

#include <nanobind/nanobind.h>

namespace dyno {

void register_errors(nanobind::module_& m);

}  // namespace dyno
