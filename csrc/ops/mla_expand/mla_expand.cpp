#include "ops/mla_expand/mla_expand.h"

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/compiled_chips.h"
#include "ops/contract.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/layout.h"
#include "ops/mla_expand/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY mla_expand
#define DYNO_FAMILY_DESC MlaExpandDesc
#define DYNO_FAMILY_VARIANTS "ops/mla_expand/variants.def"
#include "ops/family_table.inc"

namespace {

Support supports_weight(std::string_view name, DType type, Layout layout, int64_t k, const DeviceInfo& device) {
  if (layout == Layout::x16 || (layout == Layout::gpu && !has_gpu_layout(type))) {
    return Support::no(
        str_cat(name, "_layout=", layout_name(layout), " of ", dtype_name(type), " has no kernel in this family"));
  }
  if (!can_dequantize(type)) return Support::no(str_cat(name, "_type=", dtype_name(type), " cannot be dequantised"));
  if (device.kind == DeviceKind::cuda && layout == Layout::plain && !is_float(type)) {
    return Support::no(str_cat(name, "_type=", dtype_name(type), " is read in layout gpu on a GPU, not plain"));
  }
  const uint32_t block = dtype_info(type).block_elements;
  if (k % block == 0) return Support::yes();
  return Support::no(
      str_cat("rows have ", k, " elements, not a multiple of the ", block, " in a block of ", dtype_name(type)));
}

// Row `row` of a matrix in float32.
void weight_row(DType type, Layout layout, const void* w, int64_t row, int64_t k, float* out) {
  const auto* base = static_cast<const std::byte*>(w);
  if (layout == Layout::gpu) {
    dequantize_gpu_row(type, k, base, row, out);
  } else {
    dequantize_row(type, base + static_cast<size_t>(row) * row_bytes(type, k), out, k);
  }
}

// Floats of the larger of the two stacks of matrices that are unpacked from layout gpu.
int64_t unpacked_floats(const MlaExpandDesc& d) {
  const int64_t k = d.k_layout == Layout::gpu ? d.heads * d.lora * d.nope : 0;
  const int64_t v = d.v_layout == Layout::gpu ? d.heads * d.dv * d.lora : 0;
  return std::max(k, v);
}

int64_t head_floats(const MlaExpandDesc& d) { return d.lora * d.nope + d.dv * d.lora; }

}  // namespace

Support supports(const MlaExpandDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m},
                                     {"heads", desc.heads},
                                     {"nope", desc.nope},
                                     {"rope", desc.rope},
                                     {"dv", desc.dv},
                                     {"lora", desc.lora}});
  if (!sizes) return sizes;
  if (!is_float(desc.cache_type) && desc.cache_type != DType::q8_0) {
    return Support::no(str_cat("cache_type=", dtype_name(desc.cache_type),
                               " is not a KV cache type; expected f32, f16, bf16 or q8_0"));
  }
  if (desc.paired && desc.cache_type != DType::f32) {
    return Support::no(str_cat("paired=1: only an f32 cache gives f16 pairs, not ", dtype_name(desc.cache_type)));
  }
  if (desc.paired && ((desc.nope | desc.rope | desc.dv) % 8) != 0) {
    return Support::no(
        str_cat("paired=1 needs multiples of 8; nope=", desc.nope, " rope=", desc.rope, " dv=", desc.dv));
  }
  const int64_t row = desc.lora + desc.rope;
  if (row % dtype_info(desc.cache_type).block_elements != 0) {
    return Support::no(str_cat("rows have ", row, " elements, not a multiple of the 32 in a block of q8_0"));
  }
  if (Support s = supports_weight("k", desc.k_type, desc.k_layout, desc.nope, device); !s) return s;
  if (Support s = supports_weight("v", desc.v_type, desc.v_layout, desc.lora, device); !s) return s;
  const Support checked = check_config(Family::mla_expand, kVariants, kInstances, config, device);
  if (!checked || device.kind == DeviceKind::cpu) return checked;
  if (config.variant == k_wgmma) {
    if (const Support chip = supports_wgmma(device); !chip) return chip;
    return fits_shared(kExpandWgmmaShared, device);
  }
  const bool floats = desc.cache_type == DType::f32;
  if (floats != (config.variant == k_pairs)) {
    return Support::no(str_cat("cache_type=", dtype_name(desc.cache_type), ": variant ", kVariants[config.variant].name,
                               " is for ", floats ? "narrower caches" : "f32 alone"));
  }
  if (!floats) return checked;
  return fits_shared(expand_pairs_shared_bytes(pairs_params::of(config).rows), device);
}

Config default_config(const MlaExpandDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cpu) return heads_params{.grain = 1024};
  if (const Config wgmma = wgmma_params{}; supports(desc, wgmma, device)) return wgmma;
  const auto rows = static_cast<int16_t>(desc.m <= 64 ? 64 : 128);
  if (desc.cache_type != DType::f32) return mma_params{.rows = rows};
  const Config pairs = pairs_params{.rows = rows};
  return supports(desc, pairs, device) ? pairs : pairs_params{.rows = 64};
}

Cost cost(const MlaExpandDesc& desc) {
  const double m = static_cast<double>(desc.m), heads = static_cast<double>(desc.heads);
  const double width = static_cast<double>(desc.nope + desc.dv);
  const double weights = heads * (static_cast<double>(layout_bytes(desc.k_type, desc.k_layout, desc.lora, desc.nope)) +
                                  static_cast<double>(layout_bytes(desc.v_type, desc.v_layout, desc.dv, desc.lora)));
  const double latents = m * static_cast<double>(row_bytes(desc.cache_type, desc.lora + desc.rope));
  const double out = m * heads * (width + static_cast<double>(desc.rope)) *
                     static_cast<double>(row_bytes(expanded_type(desc.cache_type), 1));
  return {weights + latents + out, m * heads * width * static_cast<double>(desc.lora) * 2};
}

size_t scratch_bytes(const MlaExpandDesc& desc, const Config& config) {
  const int64_t halves = expand_key_halves(desc) + expand_value_halves(desc);
  const bool pairs = config.variant == k_pairs || (config.variant == k_wgmma && desc.cache_type == DType::f32);
  if (pairs) return static_cast<size_t>(2 * halves + 2 * unpacked_floats(desc)) * 2;
  if (config.variant != k_heads) return static_cast<size_t>(halves) * 2;
  const int64_t row = desc.lora + desc.rope + std::max(desc.nope, desc.dv);
  return static_cast<size_t>(head_floats(desc) + row) * sizeof(float);
}

void launch(const Config& config, const MlaExpandDesc& d, const MlaExpandArgs& args, CpuContext& context) {
  const int64_t key = d.nope + d.rope, work = d.m * head_floats(d);
  const DType out_type = expanded_type(d.cache_type);
  // Writes `n` numbers to `rows`, from number `first` of the head with index `head` on, which has `width` numbers.
  const auto write = [out_type, &d](const float* from, uint16_t* rows, int64_t head, int64_t width, int64_t first,
                                    int64_t n) {
    if (d.paired) {
      for (int64_t i = 0; i < n; ++i) {
        uint16_t* high = rows + 2 * head * width + first + i;
        quantize_row(DType::f16, from + i, high, 1);
        float back;
        dequantize_row(DType::f16, high, &back, 1);
        const float rest = (from[i] - back) * kRestFactor;
        quantize_row(DType::f16, &rest, high + width, 1);
      }
    } else if (out_type == DType::f32) {
      std::copy_n(from, n, expanded_floats(rows) + head * width + first);
    } else {
      quantize_row(DType::f16, from, rows + head * width + first, n);
    }
  };
  const int64_t grain = int64_t{heads_params::of(config).grain} * 1024;
  parallel_ranges(context, d.heads, work, grain, [&](int64_t begin, int64_t end, std::byte* scratch) {
    auto* k_b = reinterpret_cast<float*>(scratch);  // [lora, nope]
    float* v_b = k_b + d.lora * d.nope;             // [dv, lora]
    float* latent = v_b + d.dv * d.lora;
    float* sums = latent + d.lora + d.rope;
    for (int64_t head = begin; head < end; ++head) {
      const auto* k_matrix = static_cast<const std::byte*>(args.k_b) + head * args.k_b_stride_bytes;
      const auto* v_matrix = static_cast<const std::byte*>(args.v_b) + head * args.v_b_stride_bytes;
      for (int64_t l = 0; l < d.lora; ++l) weight_row(d.k_type, d.k_layout, k_matrix, l, d.nope, k_b + l * d.nope);
      for (int64_t n = 0; n < d.dv; ++n) weight_row(d.v_type, d.v_layout, v_matrix, n, d.lora, v_b + n * d.lora);
      for (int64_t row = 0; row < d.m; ++row) {
        dequantize_row(d.cache_type, args.latents + row * args.row_bytes, latent, d.lora + d.rope);
        const int64_t at = row * d.heads + head;
        std::fill_n(sums, d.nope, 0.0f);
        for (int64_t l = 0; l < d.lora; ++l) {
          for (int64_t n = 0; n < d.nope; ++n) sums[n] += latent[l] * k_b[l * d.nope + n];
        }
        write(sums, args.keys, at, key, 0, d.nope);
        write(latent + d.lora, args.keys, at, key, d.nope, d.rope);
        for (int64_t n = 0; n < d.dv; ++n) {
          float sum = 0;
          for (int64_t l = 0; l < d.lora; ++l) sum += latent[l] * v_b[n * d.lora + l];
          sums[n] = sum;
        }
        write(sums, args.values, at, d.dv, 0, d.dv);
      }
    }
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MlaExpandDesc& desc, const MlaExpandArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::latent)) {
    throw_left_out(KernelGroup::latent);
  } else {
    const size_t needed = scratch_bytes(desc, config);
    DYNO_CHECK(DeviceError, stream.workspace_bytes >= needed, "[mla_expand] a workspace of ", stream.workspace_bytes,
               " bytes; ", needed, " are needed");
    if (desc.cache_type == DType::f32) {
      const int64_t key_halves = expand_key_halves(desc), value_halves = expand_value_halves(desc);
      auto* halves = reinterpret_cast<uint16_t*>(stream.workspace);
      uint16_t *k_rests = halves + key_halves, *v_halves = k_rests + key_halves, *v_rests = v_halves + value_halves;
      auto* floats = reinterpret_cast<float*>(v_rests + value_halves);
      const PairedWeights k{halves, k_rests, expand_padded(desc.nope)}, v{v_halves, v_rests, expand_padded(desc.lora)};
      expand_weight_pairs_cuda(desc.k_type, desc.k_layout, args.k_b, args.k_b_stride_bytes, desc.heads, desc.lora,
                               desc.nope, floats, halves, k_rests, k.pitch, stream);
      expand_weight_pairs_cuda(desc.v_type, desc.v_layout, args.v_b, args.v_b_stride_bytes, desc.heads, desc.dv,
                               desc.lora, floats, v_halves, v_rests, v.pitch, stream);
      if (config.variant == k_wgmma) return expand_wgmma_cuda(args, desc, k, v, stream);
      return expand_pairs_cuda(args, desc, k, v, pairs_params::of(config).rows, stream);
    }
    auto* k_b = reinterpret_cast<uint16_t*>(stream.workspace);
    uint16_t* v_b = k_b + expand_key_halves(desc);
    expand_weights_cuda(desc.k_type, desc.k_layout, args.k_b, args.k_b_stride_bytes, desc.heads, desc.lora, desc.nope,
                        k_b, expand_padded(desc.nope), stream);
    expand_weights_cuda(desc.v_type, desc.v_layout, args.v_b, args.v_b_stride_bytes, desc.heads, desc.dv, desc.lora,
                        v_b, expand_padded(desc.lora), stream);
    if (config.variant == k_wgmma) {
      const PairedWeights k{k_b, nullptr, expand_padded(desc.nope)}, v{v_b, nullptr, expand_padded(desc.lora)};
      return expand_wgmma_cuda(args, desc, k, v, stream);
    }
    expand_products_cuda(args, desc, k_b, v_b, mma_params::of(config).rows, stream);
  }
}
#endif

}  // namespace dyno::ops
