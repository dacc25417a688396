// Where weights lie, from a dict of Python.
#pragma once

#include <nanobind/nanobind.h>

#include "plan/plan.h"

namespace dyno {

// Throws ProfileError for unknown names and values of another type. The plan checks what they mean.
plan::PlacementOptions read_placement(const nanobind::dict& dict);

}  // namespace dyno
