// Times single ops on synthetic data, for the tuner and for benchmarks.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>
#include <vector>

namespace dyno {

// Seconds of each launch, in order: at least `min_seconds` in total and at least five launches, after a warm-up.
// Launches cycle through as many copies of all arguments as fill `rotate_bytes`, so that data larger than the caches is
// read from memory, as in a whole model; 0 keeps one copy.
// `depth`: number of positions before the batch (attention, kv_store). `sequences`: the sequences that the tokens
// belong to, each with `depth` positions of its own. `absent`: share of the rows (token, slot) of matmul_id and
// moe_up_gate without an expert here. Random data and routing depend only on `seed`. On a GPU, the launches of all
// copies are captured in one graph. Every sample is the time of a replay divided by its launches.
std::vector<double> time_op(std::string_view family, const nanobind::dict& desc,
                            const std::optional<nanobind::dict>& config, int threads, double min_seconds,
                            int64_t rotate_bytes, uint64_t seed, int64_t depth, int64_t sequences, double absent,
                            std::string_view isa, std::string_view device);

// Times several configurations on the same arguments, one after the other, because creating arguments takes longer than
// launches. A configuration that cannot be launched has no samples.
std::vector<std::vector<double>> time_op_configs(std::string_view family, const nanobind::dict& desc,
                                                 const std::vector<nanobind::dict>& configs, int threads,
                                                 double min_seconds, int64_t rotate_bytes, uint64_t seed, int64_t depth,
                                                 int64_t sequences, double absent, std::string_view isa,
                                                 std::string_view device);

}  // namespace dyno
