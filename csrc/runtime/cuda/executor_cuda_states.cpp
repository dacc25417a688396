// Copies of what sequences keep on a GPU.
#include <utility>

#include "core/cuda/check.h"
#include "runtime/cuda/executor_cuda.h"

namespace dyno::runtime {

void CudaExecutor::copy_state(int32_t slot, std::byte* host, bool save) {
  const DeviceScope scope(info().ordinal, "copying a sequence's state");
  for (const plan::State& state : plan_.states) {
    const size_t bytes = state.sequence_bytes();
    std::byte* device = states_.data() + state.offset + bytes * static_cast<size_t>(slot);
    if (state.device == device_) {
      DYNO_CUDA_CHECK(
          cudaMemcpyAsync(save ? host : device, save ? device : host, bytes, cudaMemcpyDefault, stream_.get()));
    }
    host += bytes;
  }
  finish();
}

void CudaExecutor::save_state(int32_t slot, std::byte* to) { copy_state(slot, to, /*save=*/true); }

void CudaExecutor::load_state(int32_t slot, const std::byte* from) {
  copy_state(slot, const_cast<std::byte*>(from), /*save=*/false);
}

void CudaExecutor::copy_sequence(int32_t from, int32_t to, int64_t positions) {
  const DeviceScope scope(info().ordinal, "copying a sequence");
  const auto copy = [&](std::byte* base, size_t slot_bytes, size_t bytes) {
    if (bytes == 0) return;
    DYNO_CUDA_CHECK(cudaMemcpyAsync(base + slot_bytes * static_cast<size_t>(to),
                                    base + slot_bytes * static_cast<size_t>(from), bytes, cudaMemcpyDeviceToDevice,
                                    stream_.get()));
  };
  for (const plan::KvLayer& kv : plan_.kv) {
    if (kv.device != device_) continue;
    for (const auto& [offset, row] : {std::pair(kv.k_offset, kv.k_row_bytes), std::pair(kv.v_offset, kv.v_row_bytes)}) {
      copy(cache_.data() + offset, static_cast<size_t>(plan_.context.ctx * row), static_cast<size_t>(positions * row));
    }
  }
  for (const plan::State& state : plan_.states) {
    if (state.device == device_) copy(states_.data() + state.offset, state.sequence_bytes(), state.sequence_bytes());
  }
  finish();
}

}  // namespace dyno::runtime
