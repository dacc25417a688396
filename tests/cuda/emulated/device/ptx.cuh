// The instructions of csrc/device/ptx.cuh that products of few tokens use, over emulated threads.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace dyno::device {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emulated::shared_memory);
}
inline void prefetch_l2(const void*) {}

// Asynchronous copies. Until a thread waits for its copy, NaNs stand where it arrives: a read that comes too early
// finds them, and a copy that starts too early destroys what is still read.
inline void copy_async_16(uint32_t shared, const void* global, bool valid) {
  constexpr size_t kBytes = 16;
  uint8_t* const to = emulated::shared_memory + shared;
  const auto* const from = static_cast<const uint8_t*>(global);
  if (reinterpret_cast<uintptr_t>(to) % kBytes != 0 || reinterpret_cast<uintptr_t>(from) % kBytes != 0) {
    emulated::fault = "16 bytes are not aligned";
    return;
  }
  const auto within = [&](const auto& range) { return from >= range.first && from + kBytes <= range.second; };
  const auto& ranges = emulated::readable;
  if (valid && !ranges.empty() && std::none_of(ranges.begin(), ranges.end(), within)) {
    emulated::fault = "a copy reads behind the cache";
    return;
  }
  std::memset(to, 0xff, kBytes);
  emulated::fibers[emulated::current].copies.back().push_back({to, valid ? from : nullptr, kBytes});
}
inline void copy_async_commit() { emulated::fibers[emulated::current].copies.emplace_back(); }
template <int kPending>
void copy_async_wait() {
  auto& groups = emulated::fibers[emulated::current].copies;
  while (groups.size() > kPending + 1) {  // the last one is open
    for (const emulated::Copy& copy : groups.front()) {
      if (copy.from != nullptr) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
    groups.erase(groups.begin());
  }
}

template <typename T>
T load(const void* p) {
  return *static_cast<const T*>(p);
}
inline int32_t load_l2(const int32_t* p) { return *p; }
inline uint4 load_stream_16(const void* p) { return load<uint4>(p); }
inline uint2 load_stream_8(const void* p) { return load<uint2>(p); }
inline uint32_t load_stream_4(const void* p) { return load<uint32_t>(p); }

inline float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

inline uint32_t as_bits(__half2 v) { return __builtin_bit_cast(uint32_t, v); }
inline __half2 as_half2(uint32_t v) { return __builtin_bit_cast(__half2, v); }
inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
inline uint32_t pack_half2(float low, float high) {
  constexpr float kMax = 65504.0f;
  const auto limited = [](float v) { return std::fabs(v) > kMax ? std::copysign(kMax, v) : v; };
  return as_bits(__floats2half2_rn(limited(low), limited(high)));
}

inline uint32_t permute_or_sign(uint32_t low, uint32_t high, uint32_t which) {
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = which >> (4 * i) & 15u;
    const uint32_t byte = (nibble & 4u ? high : low) >> (nibble & 3u) * 8 & 255u;
    out |= (nibble < 8 ? byte : byte >> 7 ? 255u : 0u) << (8 * i);
  }
  return out;
}

// c[16, 8] += a[16, 32] · b[32, 8] of a warp, bytes; Left: the type of those of a.
template <typename Left>
void mma_bytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  static thread_local Operands operands[emulated::kMaxThreads];
  const unsigned thread = emulated::fibers[emulated::current].index.x, lane = emulated::lane(), first = thread - lane;
  operands[thread] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulated::sync_warp();
  const auto left = [](uint32_t word, unsigned which) {
    return static_cast<int32_t>(static_cast<Left>(word >> (8 * which)));
  };
  const auto right = [](uint32_t word, unsigned which) {
    return static_cast<int32_t>(static_cast<int8_t>(word >> (8 * which)));
  };
  for (unsigned e = 0; e < 4; ++e) {
    const unsigned row = lane / 4 + 8 * (e / 2), column = lane % 4 * 2 + e % 2;
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned t = k % 16 / 4, high = k / 16;
      c[e] += left(operands[first + row % 8 * 4 + t].a[row / 8 + 2 * high], k % 4) *
              right(operands[first + column * 4 + t].b[high], k % 4);
    }
  }
  emulated::sync_warp();
}
inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bytes<int8_t>(c, a, b0, b1);
}
inline void mma_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bytes<uint8_t>(c, a, b0, b1);
}

// c[16, 8] += a[16, 16] · b[16, 8] of a warp, as mma.m16n8k16 deals the elements out. floats(pair): the two elements of
// a register.
template <typename Floats>
void mma_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Floats& floats) {
  struct Operands {
    float2 a[4], b[2];
  };
  static thread_local Operands operands[emulated::kMaxThreads];
  const unsigned thread = emulated::fibers[emulated::current].index.x, lane = emulated::lane(), first = thread - lane;
  operands[thread] = {{floats(a[0]), floats(a[1]), floats(a[2]), floats(a[3])}, {floats(b0), floats(b1)}};
  emulated::sync_warp();
  const auto half = [](float2 pair, unsigned which) { return which == 0 ? pair.x : pair.y; };
  for (unsigned e = 0; e < 4; ++e) {
    const unsigned row = lane / 4 + 8 * (e / 2), column = lane % 4 * 2 + e % 2;
    float sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned t = k % 8 / 2, high = k / 8;
      sum += half(operands[first + row % 8 * 4 + t].a[row / 8 + 2 * high], k % 2) *
             half(operands[first + column * 4 + t].b[high], k % 2);
    }
    c[e] += sum;
  }
  emulated::sync_warp();
}

inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_16(c, a, b0, b1, [](uint32_t pair) { return __half22float2(as_half2(pair)); });
}

}  // namespace dyno::device
