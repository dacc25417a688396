// Time of launches on the device: they replay from a graph, so that the host's part does not count.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "core/cuda/check.h"

namespace dyno::testing {

struct Timer {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr, stop = nullptr;
  Timer() {
    DYNO_CUDA_CHECK(cudaStreamCreate(&stream));
    DYNO_CUDA_CHECK(cudaEventCreate(&start));
    DYNO_CUDA_CHECK(cudaEventCreate(&stop));
  }
  // Median microseconds of body(i), `count` of which make a graph; of `repeats` replays after two.
  double microseconds(int count, const std::function<void(int)>& body, int repeats = 5) const {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    body(0);
    DYNO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) body(i);
    DYNO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    DYNO_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < repeats + 2; ++i) {
      DYNO_CUDA_CHECK(cudaEventRecord(start, stream));
      DYNO_CUDA_CHECK(cudaGraphLaunch(replay, stream));
      DYNO_CUDA_CHECK(cudaEventRecord(stop, stream));
      DYNO_CUDA_CHECK(cudaStreamSynchronize(stream));
      float milliseconds = 0;
      DYNO_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
      if (i >= 2) times.push_back(milliseconds);
    }
    DYNO_CUDA_CHECK(cudaGraphExecDestroy(replay));
    DYNO_CUDA_CHECK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1000.0 / count;
  }
};

}  // namespace dyno::testing
