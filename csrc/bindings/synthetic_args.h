// Arguments of every family, filled with plausible random data, for timing single ops. The object owns them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/fields.h"
#include "ops/launch.h"

namespace dyno {

// Runs of m tokens at `position`; if they do not divide evenly among the sequences, the first ones have one more.
inline std::vector<ops::SequenceRun> divided_runs(int64_t m, int64_t sequences, int64_t position) {
  std::vector<ops::SequenceRun> runs;
  int32_t first = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const auto tokens = static_cast<int32_t>(m / sequences + (i < m % sequences ? 1 : 0));
    runs.push_back({first, tokens, static_cast<int32_t>(position), static_cast<int32_t>(i)});
    first += tokens;
  }
  return runs;
}

class SyntheticArgs {
 public:
  // Takes a filled host array and returns the address for launches. The host array may be freed if it was copied.
  using Publish = std::function<std::byte*(const std::byte* host, size_t bytes)>;

  // `publish`: copies arrays for launches on another device; without it they stay in host memory. `absent`: share of
  // rows (token, slot) without an expert.
  SyntheticArgs(uint64_t seed, int64_t depth, int64_t sequences, double absent, Publish publish = nullptr)
      : random_(seed), depth_(depth), sequences_(sequences), absent_(absent), publish_(std::move(publish)) {}

  // Bytes of all arrays so far.
  int64_t total_bytes() const { return bytes_; }

  // The arguments that the family's arguments() names.
  template <typename Desc>
  ops::ArgsOf<Desc> make(const Desc& d) {
    ops::ArgsOf<Desc> args;
    arguments(d, args, *this);
    return args;
  }

  template <typename T>
  void number(const char*, T& value, std::type_identity_t<T> otherwise) {
    value = otherwise;
  }
  template <typename T>
  void number(const char*, T& value, std::type_identity_t<T>, std::type_identity_t<T> timed) {
    value = timed;
  }
  void in(const char*, const float*& data, int64_t count) { data = floats(count); }
  void out(const char*, float*& data, int64_t count) { data = floats(count); }
  void out(const char*, int32_t*& data, int64_t count) { data = draw_integers(count, 1); }
  void optional(const char*, const float*& data, int64_t count, bool wanted) {
    data = wanted ? floats(count) : nullptr;
  }
  void optional(const char*, const int32_t*& data, int64_t, bool) { data = nullptr; }
  void optional_out(const char*, int32_t*& data, int64_t) { data = nullptr; }
  void constants(const char*, const float*& data, int64_t count, float value) { data = fill(count, value); }
  void integers(const char*, const int32_t*& data, int64_t count, int64_t limit) { data = draw_integers(count, limit); }
  void routing(const char*, const int32_t*& ids, int64_t m, int64_t used, int64_t experts) {
    ids = draw_routing(m, used, experts);
  }
  void bytes(const char*, const void*& data, int64_t count) { data = weights(count); }
  void bytes_out(const char*, void*& data, int64_t count) { data = weights(count); }
  void bytes_out(const char*, float*& data, int64_t count) { data = reinterpret_cast<float*>(weights(count)); }
  void bytes_out(const char*, uint16_t*& data, int64_t count) { data = reinterpret_cast<uint16_t*>(weights(count)); }
  void rows(const char*, const void*& x, ops::ActType act, int64_t count) { x = activations(act, count); }
  template <typename Args>
  void runs(int64_t m, Args& args) {
    n_runs_ = std::min(m, sequences_);
    const std::vector<ops::SequenceRun>& host = host_runs_.emplace_back(divided_runs(m, n_runs_, depth_));
    const Block block = allocate(n_runs_ * static_cast<int64_t>(sizeof(ops::SequenceRun)));
    std::memcpy(block.data, host.data(), host.size() * sizeof(ops::SequenceRun));
    args.runs = publish<ops::SequenceRun>(block);
    args.n_runs = static_cast<int32_t>(n_runs_);
    args.slot_positions = depth_ + (m + n_runs_ - 1) / n_runs_;
    positions_ = n_runs_ * args.slot_positions;
    if constexpr (requires { args.depth; }) {
      args.host_runs = host.data();
      args.depth = args.slot_positions;
    }
  }
  void state(const char*, float*& data, int64_t elements) { data = floats(n_runs_ * elements); }
  template <typename Byte>
  void cache(const char*, Byte*& data, const char*, int64_t& row, DType type, int64_t elements, int64_t = 0) {
    row = static_cast<int64_t>(row_bytes(type, elements));
    data = draw_cache(type, positions_ * elements);
  }
  void latents(const char*, const std::byte*& data, DType type, int64_t rows, int64_t, int64_t elements) {
    data = draw_cache(type, rows * elements);
  }
  void require(bool, const char*) const {}

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  struct Block {
    std::byte* data;
    size_t size;
  };
  Block allocate(int64_t bytes) {
    const size_t size = (static_cast<size_t>(bytes) + 64) / 64 * 64;
    owned_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, size)));
    DYNO_CHECK(OutOfMemoryError, owned_.back() != nullptr, "[ops] cannot allocate ", size,
               " bytes for the operands of a timed op");
    bytes_ += static_cast<int64_t>(size);
    return {owned_.back().get(), size};
  }
  // The address for launches of the most recently allocated array.
  template <typename T>
  T* publish(Block block) {
    std::byte* address = block.data;
    if (publish_) {
      address = publish_(block.data, block.size);
      owned_.pop_back();
    }
    return reinterpret_cast<T*>(address);
  }
  // An array repeats its first megabyte, because random data for all of it would take longer than the timing.
  static constexpr int64_t kPeriod = int64_t{1} << 20;
  static void repeat(Block block, size_t drawn) {
    for (size_t at = drawn; drawn > 0 && at < block.size; at += drawn) {
      std::memcpy(block.data + at, block.data, std::min(drawn, block.size - at));
    }
  }
  float uniform() { return static_cast<float>(static_cast<int32_t>(random_() >> 40) - (1 << 23)) * 0x1p-23f; }

  float* floats(int64_t count) {
    const Block block = allocate(count * 4);
    auto* out = reinterpret_cast<float*>(block.data);
    const int64_t drawn = std::min<int64_t>(count, kPeriod / 4);
    for (int64_t i = 0; i < drawn; ++i) out[i] = uniform();
    repeat(block, static_cast<size_t>(drawn) * 4);
    return publish<float>(block);
  }
  float* fill(int64_t count, float value) {
    const Block block = allocate(count * 4);
    std::fill_n(reinterpret_cast<float*>(block.data), count, value);
    return publish<float>(block);
  }
  int32_t* draw_integers(int64_t count, int64_t limit) {
    const Block block = allocate(count * 4);
    auto* out = reinterpret_cast<int32_t*>(block.data);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(random_() % static_cast<uint64_t>(limit));
    return publish<int32_t>(block);
  }
  // Bytes from 0x20 to 0x3f. As scales of any type they are ordinary positive numbers, never subnormal, infinite or
  // NaN, which would change the speed.
  std::byte* weights(int64_t bytes) {
    const Block block = allocate(bytes);
    const size_t drawn = std::min<size_t>(block.size, kPeriod);
    for (size_t i = 0; i < drawn; i += 8) {
      const uint64_t word = (random_() & 0x1f1f1f1f1f1f1f1f) | 0x2020202020202020;
      std::memcpy(block.data + i, &word, 8);
    }
    repeat(block, drawn);
    return publish<std::byte>(block);
  }
  void* activations(ops::ActType act, int64_t bytes) {
    return act == ops::ActType::f32 ? static_cast<void*>(floats(bytes / 4)) : weights(bytes);
  }
  std::byte* draw_cache(DType type, int64_t elements) {
    const Block block = allocate(static_cast<int64_t>(row_bytes(type, elements)));
    const std::unique_ptr<float[]> values(new float[static_cast<size_t>(elements)]);
    for (int64_t i = 0; i < elements; ++i) values[static_cast<size_t>(i)] = uniform();
    quantize_row(type, values.get(), block.data, elements);
    return publish<std::byte>(block);
  }
  // Routes each token to `used` distinct experts, some of which are on another device.
  int32_t* draw_routing(int64_t m, int64_t used, int64_t experts) {
    const Block block = allocate(m * used * 4);
    auto* ids = reinterpret_cast<int32_t*>(block.data);
    for (int64_t token = 0; token < m; ++token) {
      int32_t* row = ids + token * used;
      for (int64_t slot = 0; slot < used; ++slot) {
        row[slot] = static_cast<int32_t>(random_() % static_cast<uint64_t>(experts));
        while (std::find(row, row + slot, row[slot]) != row + slot) {
          row[slot] = static_cast<int32_t>((row[slot] + 1) % experts);
        }
      }
    }
    std::bernoulli_distribution absent(absent_);
    for (int64_t i = 0; absent_ > 0 && i < m * used; ++i) {
      if (absent(random_)) ids[i] = -1;
    }
    return publish<int32_t>(block);
  }
  std::mt19937_64 random_;
  int64_t depth_, sequences_;
  double absent_;
  int64_t n_runs_ = 1;
  int64_t positions_ = 0;  // of the cache, for all sequences
  Publish publish_;
  int64_t bytes_ = 0;
  std::vector<std::unique_ptr<std::byte, Free>> owned_;
  std::deque<std::vector<ops::SequenceRun>> host_runs_;
};

}  // namespace dyno
