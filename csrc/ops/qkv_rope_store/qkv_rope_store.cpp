#include "ops/qkv_rope_store/qkv_rope_store.h"

#include <algorithm>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/kv_store/kv_store.h"
#include "ops/norm/kernels.h"
#include "ops/parallel.h"
#include "ops/qkv_rope_store/kernels_cuda.h"
#include "ops/registry.h"
#include "ops/rope/kernels.h"
#include "ops/runs.h"

namespace dyno::ops {

#define DYNO_FAMILY qkv_rope_store
#define DYNO_FAMILY_DESC QkvRopeStoreDesc
#define DYNO_FAMILY_VARIANTS "ops/qkv_rope_store/variants.def"
#include "ops/family_table.inc"

namespace {

Support cache_row(std::string_view name, DType type, int64_t width) {
  if (!is_float(type) && type != DType::q8_0) {
    return Support::no(
        str_cat(name, "=", dtype_name(type), " is not a KV cache type; expected f32, f16, bf16 or q8_0"));
  }
  if (width % dtype_info(type).block_elements == 0) return Support::yes();
  return Support::no(str_cat("a head has ", width, " elements, not a multiple of the 32 in a block of q8_0"));
}

// One token on the CPU.
struct Token {
  const QkvRopeStoreDesc& d;
  const QkvRopeStoreArgs& a;
  int64_t token;
  CpuIsa isa;
  float* table;  // n_rot
  float* row;    // max(dk, dv) * kv_heads

  void norm(float* x, const float* weight, int64_t n, int64_t rows) const {
    const NormArgs args{.x = x, .weight = weight, .out = x, .eps = a.eps};
    DYNO_DISPATCH_ISA(isa, norm_rows(args, n, rows, 0, rows));
  }
  void rope(float* x, int64_t heads, int64_t dim, int64_t offset) const {
    const RopeArgs args{.x = x, .positions = a.positions + token, .inv_freq = a.inv_freq, .mscale = a.mscale};
    DYNO_DISPATCH_ISA(isa, rope_tokens(args, heads, dim, d.n_rot, offset, d.neox, 0, 1, table));
  }
  void queries() const {
    float* q = a.q + token * a.q_stride;
    const int64_t rest = d.dk - d.n_rot;
    if (!d.latent) {
      if (d.q_norm) norm(q, a.q_norm, d.dk, d.heads);
      rope(q, d.heads, d.dk, 0);
      return;
    }
    float* out = a.q_out + token * a.q_out_stride;
    for (int64_t head = 0; head < d.heads; ++head) {
      std::copy_n(q + head * (d.nope + d.n_rot) + d.nope, d.n_rot, out + head * d.dk + rest);
    }
    rope(out, d.heads, d.dk, rest);
  }
  void keys(int64_t cell) const {
    std::copy_n(a.k + token * a.k_stride, d.kv_heads * d.dk, row);
    const int64_t rest = d.dk - d.n_rot;
    if (d.k_norm) norm(row, a.k_norm, d.latent ? rest : d.dk, d.kv_heads);
    rope(row, d.kv_heads, d.dk, d.latent ? rest : 0);
    store_cache_row(isa, d.k_type, row, a.k_cache + cell * a.k_row_bytes, d.kv_heads * d.dk);
  }
  void values(int64_t cell) const {
    const float* from = a.v + token * a.v_stride;
    if (d.v_norm) {
      std::copy_n(from, d.kv_heads * d.dv, row);
      norm(row, nullptr, d.dv, d.kv_heads);
      from = row;
    }
    store_cache_row(isa, d.v_type, from, a.v_cache + cell * a.v_row_bytes, d.kv_heads * d.dv);
  }
};

}  // namespace

Support supports(const QkvRopeStoreDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes(
      {{"m", desc.m}, {"heads", desc.heads}, {"kv_heads", desc.kv_heads}, {"dk", desc.dk}, {"dv", desc.dv}});
  if (!sizes) return sizes;
  if (desc.n_rot < 2 || desc.n_rot % 2 != 0 || desc.n_rot > desc.dk) {
    return Support::no(str_cat("n_rot=", desc.n_rot, " is not an even number from 2 to dk=", desc.dk));
  }
  if (desc.nope < 0 || (desc.nope > 0 && !desc.latent)) {
    return Support::no(str_cat("nope=", desc.nope, ": only queries of latent attention have a part without rotation"));
  }
  if (desc.latent && (desc.kv_heads != 1 || desc.n_rot == desc.dk || desc.q_norm || desc.v_norm)) {
    return Support::no(
        str_cat("latent with kv_heads=", desc.kv_heads, " dk=", desc.dk, " n_rot=", desc.n_rot,
                desc.q_norm ? " q_norm" : "", desc.v_norm ? " v_norm" : "",
                ": latent attention has one row with a latent and a rotary key, and no norm of queries or values"));
  }
  if (const Support keys = cache_row("k_type", desc.k_type, desc.dk); !keys) return keys;
  if (const Support values = cache_row("v_type", desc.v_type, desc.latent ? 32 : desc.dv); !values) return values;
  const int64_t widest = std::max({desc.dk, desc.latent ? int64_t{0} : desc.dv});
  if (device.kind == DeviceKind::cuda && widest > kCudaMaxHeadRow) {
    return Support::no(str_cat("heads of ", widest, " are wider than the ", kCudaMaxHeadRow, " of a CUDA warp"));
  }
  return check_config(Family::qkv_rope_store, kVariants, kInstances, config, device);
}

Config default_config(const QkvRopeStoreDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return rows_params{.grain = 16};
  const int64_t items = desc.m * (desc.heads + 2 * desc.kv_heads);
  return heads_params{.warps = static_cast<int16_t>(items <= 4 * device.sm_count ? 1 : 4)};
}

Cost cost(const QkvRopeStoreDesc& desc) {
  const double m = static_cast<double>(desc.m), kv = static_cast<double>(desc.kv_heads);
  const double q = static_cast<double>(desc.heads * (desc.latent || !desc.q_norm ? desc.n_rot : desc.dk));
  const double k = kv * static_cast<double>(desc.dk), v = desc.latent ? 0 : kv * static_cast<double>(desc.dv);
  const double stored = kv * (static_cast<double>(row_bytes(desc.k_type, desc.dk)) +
                              (desc.latent ? 0 : static_cast<double>(row_bytes(desc.v_type, desc.dv))));
  const double rotated = static_cast<double>((desc.heads + desc.kv_heads) * desc.n_rot);
  return {m * ((2 * q + k + v) * 4 + stored),
          m * (3 * rotated + (desc.q_norm ? 4 * q : 0) + (desc.k_norm ? 4 * k : 0) + (desc.v_norm ? 4 * v : 0))};
}

size_t scratch_bytes(const QkvRopeStoreDesc& desc, const Config& config) {
  if (config.variant == k_heads) return 0;
  const int64_t row = desc.kv_heads * (desc.v_norm ? std::max(desc.dk, desc.dv) : desc.dk);
  return static_cast<size_t>((desc.n_rot + 15) / 16 * 16 + row) * sizeof(float);
}

void launch(const Config& config, const QkvRopeStoreDesc& desc, const QkvRopeStoreArgs& args, CpuContext& context) {
  check_runs("qkv_rope_store", args.runs, args.n_runs, desc.m, args.slot_positions);
  for (int64_t token = 0; token < desc.m; ++token) {
    DYNO_CHECK(PlanError, args.positions[token] >= 0, "[qkv_rope_store] token ", token, " has position ",
               args.positions[token]);
  }
  const int64_t elements = desc.heads * desc.dk + desc.kv_heads * (desc.dk + desc.dv);
  parallel_ranges(context, desc.m, elements, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte* scratch) {
                    float* table = reinterpret_cast<float*>(scratch);
                    for (int64_t at = begin; at < end; ++at) {
                      const Token token{desc, args, at, context.isa, table, table + (desc.n_rot + 15) / 16 * 16};
                      token.queries();
                      const auto* run = std::find_if(args.runs, args.runs + args.n_runs, [&](const SequenceRun& r) {
                        return at >= r.first_token && at < int64_t{r.first_token} + r.n_tokens;
                      });
                      if (run == args.runs + args.n_runs) continue;
                      const int64_t cell = run->slot * args.slot_positions + run->position + (at - run->first_token);
                      token.keys(cell);
                      if (!desc.latent) token.values(cell);
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const QkvRopeStoreDesc& desc, const QkvRopeStoreArgs& args, CudaStream& stream) {
  qkv_heads_cuda(args, desc, heads_params::of(config).warps, stream);
}
#endif

}  // namespace dyno::ops
