// Family mla_expand: computes keys and values of all heads from the latent cache of multi-head latent attention
// (DeepSeek-V2, arXiv:2405.04434, equation 10), so that ordinary attention can read them. They are f16, or f32 with an
// f32 cache.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// The type of the expanded keys and values: f32 if the cache is f32, so that no precision is lost, otherwise f16.
constexpr DType expanded_type(DType cache_type) { return cache_type == DType::f32 ? DType::f32 : DType::f16; }
// The rows in MlaExpandArgs as floats, which they are with an f32 cache.
inline float* expanded_floats(uint16_t* rows) { return reinterpret_cast<float*>(rows); }

// The factor of rests in f16 pairs, so that they are not subnormal (device::kRestScale).
inline constexpr float kRestFactor = 2048.0f;

std::span<const VariantInfo> mla_expand_variants();
std::string op_key(const MlaExpandDesc& desc);
std::vector<Config> candidates(const MlaExpandDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MlaExpandDesc& desc, const DeviceInfo& device);
Support supports(const MlaExpandDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MlaExpandDesc& desc);
size_t scratch_bytes(const MlaExpandDesc& desc, const Config& config);
void launch(const Config& config, const MlaExpandDesc& desc, const MlaExpandArgs& args, CpuContext& context);
void launch(const Config& config, const MlaExpandDesc& desc, const MlaExpandArgs& args, CudaStream& stream);

}  // namespace dyno::ops
