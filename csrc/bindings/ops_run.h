// Launches single ops on NumPy arrays, for tests and benchmarks.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>

namespace dyno {

void run_op(std::string_view family, const nanobind::dict& desc, const std::optional<nanobind::dict>& config,
            const nanobind::dict& args, int threads, std::string_view isa, std::string_view device, bool captured,
            int sm_count);

}  // namespace dyno
