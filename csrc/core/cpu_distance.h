// The distance between CPUs: the time that a cache line takes from one to the other and back.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace dyno {

struct CpuDistances {
  double median_ns = 0;                // over all measured pairs; a cache line's way there and back
  double farthest_ns = 0;              // of the farthest pair
  std::pair<int, int> farthest{0, 0};  // numbers of its CPUs
  int pairs = 0;                       // number of measured pairs; 0 = unknown
  std::string unknown;                 // why nothing is known; empty if something is
};

// Pairs of neighbours in a ring of CPUs: at most `most`, evenly spread.
std::vector<std::pair<int, int>> ring_of_pairs(const std::vector<int>& cpus, int most);

// Measures the CPUs that the calling thread may use, for at most about a tenth of a second and usually for less than
// 10 ms. Two threads, which are pinned, pass a cache line to and fro. The affinity of the caller does not change. If a
// CPU is busy, taken away or refused, the answer is unknown.
CpuDistances measure_cpu_distances();

}  // namespace dyno
