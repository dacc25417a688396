// Timing single ops on synthetic data, for the tuner and for benches.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>
#include <vector>

namespace dyno {

// Seconds of each launch, in order: at least `min_seconds` of them in all and at least five launches, after a warm-up.
// The launches walk through as many copies of all arguments as fill `rotate_bytes`, so that data larger than the caches
// is read from memory as in a whole model; 0 keeps one copy. `depth` is the number of positions before the batch
// (attention, kv_store). `absent` of the rows (token, slot) of matmul_id and moe_up_gate have no expert here. Random
// data and routing depend on `seed` alone. On a GPU the launches of all copies are captured in one graph, and every
// sample is a replay of it divided by its launches.
std::vector<double> time_op(std::string_view family, const nanobind::dict& desc,
                            const std::optional<nanobind::dict>& config, int threads, double min_seconds,
                            int64_t rotate_bytes, uint64_t seed, int64_t depth, double absent, std::string_view isa,
                            std::string_view device);

// The same of several configurations on the same arguments, in turn: making them takes longer than the launches. What
// cannot be launched has no samples.
std::vector<std::vector<double>> time_op_configs(std::string_view family, const nanobind::dict& desc,
                                                 const std::vector<nanobind::dict>& configs, int threads,
                                                 double min_seconds, int64_t rotate_bytes, uint64_t seed, int64_t depth,
                                                 double absent, std::string_view isa, std::string_view device);

}  // namespace dyno
