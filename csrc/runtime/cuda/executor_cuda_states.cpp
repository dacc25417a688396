// Copies and memory of sequences on a GPU.
#include <algorithm>
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

void CudaExecutor::for_rows(int32_t slot, int64_t begin, int64_t end, CacheLayers layers,
                            const std::function<void(size_t, size_t)>& use) const {
  const int64_t first = slot * plan_.context.ctx;
  for (const plan::KvLayer& kv : plan_.kv) {
    if (kv.device != device_ || !concerns(layers, kv)) continue;
    for (const auto& [offset, row] : {std::pair(kv.k_offset, kv.k_row_bytes), std::pair(kv.v_offset, kv.v_row_bytes)}) {
      if (row == 0) continue;
      use(offset + static_cast<size_t>((first + begin) * row), offset + static_cast<size_t>((first + end) * row));
    }
  }
}

// Maps memory up to the end of a tile, because a kernel reads whole tiles of rows, although it uses only held rows.
void CudaExecutor::take(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) {
  if (!cache_.by_need()) return;
  const DeviceScope scope(info().ordinal, "taking memory for a sequence");
  for_rows(slot, begin, end + plan::kRowsBehind, layers,
           [&](size_t from, size_t to) { cache_.take(from, to, stream_.get()); });
}

void CudaExecutor::give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) {
  if (!cache_.by_need()) return;
  const DeviceScope scope(info().ordinal, "giving back the memory of a sequence");
  // Rows that windows have passed come before rows that are held, and are freed after each u-batch, so the device must
  // not wait for them. In the other case nothing after the position is held, up to the next sequence.
  const bool windows = layers == CacheLayers::windowed;
  if (!windows) finish();
  const int64_t last = windows ? end : plan_.context.ctx;
  for_rows(slot, std::min(begin + plan::kRowsBehind, last), last, layers,
           [&](size_t from, size_t to) { windows ? cache_.give_back_later(from, to) : cache_.give_back(from, to); });
}

// Later launches and graphs use the same addresses; a take() maps memory there first.
void CudaExecutor::settle() {
  if (!cache_.unsettled()) return;
  const DeviceScope scope(info().ordinal, "giving back the memory of a sequence");
  finish();
  cache_.settle();
}

void CudaExecutor::copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) {
  const DeviceScope scope(info().ordinal, "copying a sequence");
  forget_expanded(to, 0);
  const auto copy = [&](std::byte* base, size_t slot_bytes, size_t first, size_t bytes) {
    if (bytes == 0) return;
    DYNO_CUDA_CHECK(cudaMemcpyAsync(base + slot_bytes * static_cast<size_t>(to) + first,
                                    base + slot_bytes * static_cast<size_t>(from) + first, bytes,
                                    cudaMemcpyDeviceToDevice, stream_.get()));
  };
  const Rows all[] = {{0, positions}};
  for (const plan::KvLayer& kv : plan_.kv) {
    if (kv.device != device_) continue;
    for (const auto& [offset, row] : {std::pair(kv.k_offset, kv.k_row_bytes), std::pair(kv.v_offset, kv.v_row_bytes)}) {
      for (const Rows& rows : kv.window > 0 ? windowed : std::span<const Rows>(all)) {
        copy(cache_.data() + offset, static_cast<size_t>(plan_.context.ctx * row),
             static_cast<size_t>(rows.begin * row), static_cast<size_t>((rows.end - rows.begin) * row));
      }
    }
  }
  for (const plan::State& state : plan_.states) {
    if (state.device == device_) copy(states_.data() + state.offset, state.sequence_bytes(), 0, state.sequence_bytes());
  }
  finish();
}

}  // namespace dyno::runtime
