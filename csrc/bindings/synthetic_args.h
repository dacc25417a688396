// Arguments of every family filled with plausible random data, owned here: what single ops are timed on.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/args.h"
#include "ops/copy/act_q8.h"
#include "ops/matmul/layout.h"
#include "ops/mla_expand/mla_expand.h"
#include "ops/registry.h"

namespace dyno {

class SyntheticArgs {
 public:
  // Takes a filled host array and gives the address that launches use; what it copied may be freed.
  using Publish = std::function<std::byte*(const std::byte* host, size_t bytes)>;

  // `publish`: where arrays go for launches on another device; without it they stay in host memory.
  SyntheticArgs(uint64_t seed, int64_t depth, Publish publish = nullptr)
      : random_(seed), depth_(depth), publish_(std::move(publish)) {}

  // Bytes of all arrays made so far.
  int64_t bytes() const { return bytes_; }

  ops::EmbedArgs make(const ops::EmbedDesc& d) {
    ops::EmbedArgs a;
    a.rows = 1024;
    a.table = weights(a.rows * static_cast<int64_t>(row_bytes(d.type, d.n)));
    a.ids = integers(d.m, a.rows);
    a.out = floats(d.m * d.n);
    return a;
  }
  ops::NormArgs make(const ops::NormDesc& d) {
    const int64_t row = d.rows_per_token * d.n;
    ops::NormArgs a;
    a.x = floats(d.m * row);
    a.x_stride = a.out_stride = row;
    a.weight = floats(d.n);
    a.residual = d.add ? floats(d.m * row) : nullptr;
    a.out = floats(d.m * row);
    a.eps = 1e-6f;
    return a;
  }
  ops::RopeArgs make(const ops::RopeDesc& d) {
    ops::RopeArgs a;
    a.x_stride = d.heads * d.head_dim;
    a.x = floats(d.m * a.x_stride);
    a.positions = integers(d.m, 4096);
    a.inv_freq = floats(d.n_rot / 2);
    return a;
  }
  ops::MatmulArgs make(const ops::MatmulDesc& d) {
    ops::MatmulArgs a;
    a.x_batch_stride_bytes = activation_bytes(d.act, d.k);
    a.x_stride_bytes = a.x_batch_stride_bytes * d.batch;
    a.x = activations(d.act, d.m * a.x_stride_bytes);
    a.w_batch_stride_bytes = matrix_bytes(d);
    a.w = weights(d.batch * a.w_batch_stride_bytes);
    a.y_batch_stride = d.n;
    a.y_stride = d.n * d.batch;
    a.y = floats(d.m * a.y_stride);
    if (d.norm) a.norm = norm_inside(d.k);
    return a;
  }
  ops::MatmulIdArgs make(const ops::MatmulIdDesc& d) {
    ops::MatmulIdArgs a;
    a.x_stride_bytes = activation_bytes(d.act, d.k);
    a.x = activations(d.act, (d.x_per_slot ? d.m * d.used : d.m) * a.x_stride_bytes);
    a.w_expert_stride_bytes = matrix_bytes(d);
    a.w = weights(d.experts * a.w_expert_stride_bytes);
    a.ids = routing(d.m, d.used, d.experts);
    a.y = floats(d.m * d.used * d.n);
    a.workspace = integers(ops::moe_workspace_ints(d.m, d.used, d.experts), 1);
    return a;
  }
  ops::UpGateArgs make(const ops::UpGateDesc& d) {
    ops::UpGateArgs a;
    a.x_stride_bytes = activation_bytes(d.act, d.k);
    a.x = activations(d.act, d.m * a.x_stride_bytes);
    a.w_gate = weights(matrix_bytes(d));
    a.w_up = weights(matrix_bytes(d));
    a.y_stride = d.n;
    a.y = floats(d.m * d.n);
    if (d.norm) a.norm = norm_inside(d.k);
    return a;
  }
  ops::MoeUpGateArgs make(const ops::MoeUpGateDesc& d) {
    ops::MoeUpGateArgs a;
    a.x_stride_bytes = activation_bytes(d.act, d.k);
    a.x = activations(d.act, d.m * a.x_stride_bytes);
    a.w_expert_stride_bytes = matrix_bytes(d);
    a.w_gate = weights(d.experts * a.w_expert_stride_bytes);
    a.w_up = weights(d.experts * a.w_expert_stride_bytes);
    a.ids = routing(d.m, d.used, d.experts);
    a.y = floats(d.m * d.used * d.n);
    a.workspace = integers(ops::moe_workspace_ints(d.m, d.used, d.experts), 1);
    if (d.norm) a.norm = norm_inside(d.k);
    return a;
  }
  ops::QkvArgs make(const ops::QkvDesc& d) {
    const DType types[] = {d.type, d.type_k, d.type_v};
    const int64_t heights[] = {d.n, d.n_k, d.n_v};
    ops::QkvArgs a;
    a.x_stride_bytes = d.k * 4;
    a.x = floats(d.m * d.k);
    for (size_t i = 0; i < 3 && heights[i] > 0; ++i) {
      a.w[i] = weights(static_cast<int64_t>(ops::layout_bytes(types[i], d.layout, heights[i], d.k)));
      a.y_stride[i] = heights[i];
      a.y[i] = floats(d.m * heights[i]);
    }
    if (d.norm) a.norm = norm_inside(d.k);
    return a;
  }
  ops::MoeDownSumArgs make(const ops::MoeDownSumDesc& d) {
    ops::MoeDownSumArgs a;
    a.x = floats(d.m * d.used * d.k);
    a.w_expert_stride_bytes = matrix_bytes(d);
    a.w = weights(d.experts * a.w_expert_stride_bytes);
    a.ids = routing(d.m, d.used, d.experts);
    a.weights = floats(d.m * d.used);
    a.residual = floats(d.m * d.n);
    a.settled = true;
    a.out = floats(d.m * d.n);
    return a;
  }
  ops::MoeRouteArgs make(const ops::MoeRouteDesc& d) {
    ops::MoeRouteArgs a;
    a.logits = floats(d.m * d.experts);
    a.ids = integers(d.m * d.used, 1);
    a.weights = floats(d.m * d.used);
    return a;
  }
  ops::MoeSumArgs make(const ops::MoeSumDesc& d) {
    ops::MoeSumArgs a;
    a.x = floats(d.m * d.used * d.n);
    a.weights = floats(d.m * d.used);
    a.residual = floats(d.m * d.n);
    a.out = floats(d.m * d.n);
    return a;
  }
  ops::AttentionArgs make(const ops::AttentionDesc& d) {
    ops::AttentionArgs a;
    a.slot_positions = depth_ + d.m;
    a.k_row_bytes = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk));
    a.k_cache = cache(d.k_type, a.slot_positions * d.kv_heads * d.dk);
    if (!d.v_in_k) {
      a.v_row_bytes = static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv));
      a.v_cache = cache(d.v_type, a.slot_positions * d.kv_heads * d.dv);
    }
    a.q_stride = d.heads * d.dk;
    a.q = floats(d.m * a.q_stride);
    a.runs = one_run(d.m);
    a.n_runs = 1;
    a.sinks = d.sinks ? floats(d.heads) : nullptr;
    a.scale = 0.1f;
    a.softcap = 30.0f;
    a.window = 1024;
    a.out_stride = d.heads * d.dv;
    a.out = floats(d.m * a.out_stride);
    return a;
  }
  ops::KvStoreArgs make(const ops::KvStoreDesc& d) {
    ops::KvStoreArgs a;
    a.x = floats(d.m * d.width);
    a.x_stride = d.width;
    a.row_bytes = static_cast<int64_t>(row_bytes(d.type, d.width));
    a.slot_positions = depth_ + d.m;
    a.cache = cache(d.type, a.slot_positions * d.width);
    a.runs = one_run(d.m);
    a.n_runs = 1;
    return a;
  }
  ops::CopyArgs make(const ops::CopyDesc& d) {
    ops::CopyArgs a;
    a.x = floats(d.m * d.k);
    a.x_stride = d.k;
    a.out_stride_bytes = activation_bytes(d.act, d.k);
    a.out = weights(d.m * a.out_stride_bytes);
    return a;
  }
  ops::SampleArgs make(const ops::SampleDesc& d) {
    ops::SampleArgs a;
    a.logits = floats(d.m * d.n_vocab);
    a.uniform = constants(d.m, 0.5f);
    a.top_k = 40;
    a.top_p = 0.95f;
    a.temperature = 0.8f;
    a.out = integers(d.m, 1);
    return a;
  }
  ops::MlaExpandArgs make(const ops::MlaExpandDesc& d) {
    ops::MlaExpandArgs a;
    a.row_bytes = static_cast<int64_t>(row_bytes(d.cache_type, d.lora + d.rope));
    a.latents = cache(d.cache_type, d.m * (d.lora + d.rope));
    a.k_b_stride_bytes = static_cast<int64_t>(ops::layout_bytes(d.k_type, d.k_layout, d.lora, d.nope));
    a.v_b_stride_bytes = static_cast<int64_t>(ops::layout_bytes(d.v_type, d.v_layout, d.dv, d.lora));
    a.k_b = weights(d.heads * a.k_b_stride_bytes);
    a.v_b = weights(d.heads * a.v_b_stride_bytes);
    const auto bytes = static_cast<int64_t>(row_bytes(ops::expanded_type(d.cache_type), d.m * d.heads));
    a.keys = reinterpret_cast<uint16_t*>(weights(bytes * (d.nope + d.rope)));
    a.values = reinterpret_cast<uint16_t*>(weights(bytes * d.dv));
    return a;
  }
  ops::GluArgs make(const ops::GluDesc& d) {
    ops::GluArgs a;
    a.gate = floats(d.m * d.n);
    a.up = floats(d.m * d.n);
    a.y = floats(d.m * d.n);
    a.gate_stride = a.up_stride = a.y_stride = d.n;
    return a;
  }
  ops::QkvRopeStoreArgs make(const ops::QkvRopeStoreDesc& d) {
    ops::QkvRopeStoreArgs a;
    a.q_stride = d.heads * (d.latent ? d.nope + d.n_rot : d.dk);
    a.q = floats(d.m * a.q_stride);
    a.q_out_stride = d.heads * d.dk;
    a.q_out = d.latent ? floats(d.m * a.q_out_stride) : nullptr;
    a.k_stride = d.kv_heads * d.dk;
    a.k = floats(d.m * a.k_stride);
    a.q_norm = d.q_norm ? floats(d.dk) : nullptr;
    a.k_norm = d.k_norm ? floats(d.dk) : nullptr;
    a.eps = 1e-6f;
    a.positions = integers(d.m, 4096);
    a.inv_freq = floats(d.n_rot / 2);
    a.slot_positions = depth_ + d.m;
    a.k_row_bytes = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk));
    a.k_cache = cache(d.k_type, a.slot_positions * d.kv_heads * d.dk);
    if (!d.latent) {
      a.v_stride = d.kv_heads * d.dv;
      a.v = floats(d.m * a.v_stride);
      a.v_row_bytes = static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv));
      a.v_cache = cache(d.v_type, a.slot_positions * d.kv_heads * d.dv);
    }
    a.runs = one_run(d.m);
    a.n_runs = 1;
    return a;
  }
  ops::RopeAttentionArgs make(const ops::RopeAttentionDesc& d) {
    ops::RopeAttentionArgs a;
    a.q_stride = d.heads * d.dk;
    a.q = floats(d.m * a.q_stride);
    a.k_stride = d.kv_heads * d.dk;
    a.k = floats(d.m * a.k_stride);
    a.q_norm = d.q_norm ? floats(d.dk) : nullptr;
    a.k_norm = d.k_norm ? floats(d.dk) : nullptr;
    a.eps = 1e-6f;
    a.inv_freq = floats(d.n_rot / 2);
    a.slot_positions = depth_ + d.m;
    a.k_row_bytes = static_cast<int64_t>(row_bytes(d.k_type, d.kv_heads * d.dk));
    a.k_cache = cache(d.k_type, a.slot_positions * d.kv_heads * d.dk);
    if (d.latent) {
      a.q_rotary_stride = d.heads * (d.nope + d.n_rot);
      a.q_rotary = floats(d.m * a.q_rotary_stride);
    } else {
      a.v_stride = d.kv_heads * d.dv;
      a.v = floats(d.m * a.v_stride);
      a.v_row_bytes = static_cast<int64_t>(row_bytes(d.v_type, d.kv_heads * d.dv));
      a.v_cache = cache(d.v_type, a.slot_positions * d.kv_heads * d.dv);
    }
    a.runs = one_run(d.m);
    a.n_runs = 1;
    a.sinks = d.sinks ? floats(d.heads) : nullptr;
    a.scale = 0.1f;
    a.softcap = 30.0f;
    a.window = 1024;
    a.settled = true;
    a.out_stride = d.heads * d.dv;
    a.out = floats(d.m * a.out_stride);
    return a;
  }
  ops::NormRouteArgs make(const ops::NormRouteDesc& d) {
    ops::NormRouteArgs a;
    a.x = floats(d.m * d.k);
    a.x_stride = a.normed_stride = d.k;
    a.norm = floats(d.k);
    a.eps = 1e-6f;
    a.w = weights(static_cast<int64_t>(ops::layout_bytes(d.type, d.layout, d.experts, d.k)));
    a.normed = floats(d.m * d.k);
    a.route.ids = integers(d.m * d.used, 1);
    a.route.weights = floats(d.m * d.used);
    return a;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  ops::NormInside norm_inside(int64_t k) { return {.weight = floats(k), .eps = 1e-6f}; }

  static int64_t activation_bytes(ops::ActType act, int64_t k) {
    return act == ops::ActType::q8 ? static_cast<int64_t>(ops::act_q8_row_bytes(k)) : k * 4;
  }
  static int64_t matrix_bytes(const auto& d) {
    return static_cast<int64_t>(ops::layout_bytes(d.type, d.layout, d.n, d.k));
  }

  struct Block {
    std::byte* data;
    size_t size;
  };
  Block allocate(int64_t bytes) {
    const size_t size = (static_cast<size_t>(bytes) + 64) / 64 * 64;
    owned_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, size)));
    DYNO_CHECK(OutOfMemoryError, owned_.back() != nullptr, "[ops] no memory for ", size, " bytes to time with");
    bytes_ += static_cast<int64_t>(size);
    return {owned_.back().get(), size};
  }
  // The address that launches use for the array that was allocated last.
  template <typename T>
  T* publish(Block block) {
    std::byte* address = block.data;
    if (publish_) {
      address = publish_(block.data, block.size);
      owned_.pop_back();
    }
    return reinterpret_cast<T*>(address);
  }
  // What lies beyond the first megabyte of an array repeats it: drawing all of it would take longer than timing it.
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
  float* constants(int64_t count, float value) {
    const Block block = allocate(count * 4);
    std::fill_n(reinterpret_cast<float*>(block.data), count, value);
    return publish<float>(block);
  }
  int32_t* integers(int64_t count, int64_t limit) {
    const Block block = allocate(count * 4);
    auto* out = reinterpret_cast<int32_t*>(block.data);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(random_() % static_cast<uint64_t>(limit));
    return publish<int32_t>(block);
  }
  // Bytes from 0x20 to 0x3f: read as the scales of any type they are ordinary positive numbers, never subnormal,
  // infinite or NaN, which would be timed at another speed.
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
  std::byte* cache(DType type, int64_t elements) {
    const Block block = allocate(static_cast<int64_t>(row_bytes(type, elements)));
    const std::unique_ptr<float[]> values(new float[static_cast<size_t>(elements)]);
    for (int64_t i = 0; i < elements; ++i) values[static_cast<size_t>(i)] = uniform();
    quantize_row(type, values.get(), block.data, elements);
    return publish<std::byte>(block);
  }
  // Each token to `used` distinct experts.
  int32_t* routing(int64_t m, int64_t used, int64_t experts) {
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
    return publish<int32_t>(block);
  }
  const ops::SequenceRun* one_run(int64_t m) {
    const Block block = allocate(sizeof(ops::SequenceRun));
    *reinterpret_cast<ops::SequenceRun*>(block.data) = {0, static_cast<int32_t>(m), static_cast<int32_t>(depth_), 0};
    return publish<ops::SequenceRun>(block);
  }

  std::mt19937_64 random_;
  int64_t depth_;
  Publish publish_;
  int64_t bytes_ = 0;
  std::vector<std::unique_ptr<std::byte, Free>> owned_;
};

}  // namespace dyno
