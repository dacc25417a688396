// Whether a plan fits into the memory of its device, and what would make it fit: said before anything is allocated.
#include <algorithm>
#include <vector>

#include "core/checked.h"
#include "core/error.h"
#include "plan/mib.h"
#include "plan/plan.h"

namespace dyno::plan {
namespace {

// Device memory that is nobody's plan: kernels' code, cuBLAS, graphs, logits.
constexpr size_t kDeviceReserve = size_t{512} << 20;
// Below these nobody would want to run.
constexpr int64_t kLeastUbatch = 32;
constexpr int64_t kLeastContext = 256;

// A change of settings, and at least how many bytes it frees.
struct Remedy {
  std::string text;
  size_t frees = 0;
};

// The largest power of two below the u-batch that frees enough, else the smallest; what one token takes is
// proportional.
Remedy smaller_ubatch(const Plan& plan, size_t missing) {
  const size_t per_token = (plan.arena_bytes - plan.expanded_bytes()) / static_cast<size_t>(plan.ubatch);
  Remedy found;
  for (int64_t u = kLeastUbatch; u < plan.ubatch; u *= 2) {
    const size_t frees = per_token * static_cast<size_t>(plan.ubatch - u);
    if (found.text.empty() || frees >= missing) found = {str_cat("ubatch=", u), frees};
  }
  return found;
}

Remedy smaller_context(const Plan& plan, size_t missing) {
  const size_t per_position = plan.kv_bytes / static_cast<size_t>(plan.context.ctx);
  if (per_position == 0 || plan.context.ctx <= kLeastContext) return {};
  const auto fewer = static_cast<int64_t>((missing + per_position - 1) / per_position);
  const int64_t ctx = std::max(kLeastContext, (plan.context.ctx - fewer) / kLeastContext * kLeastContext);
  return {str_cat("ctx=", ctx), per_position * static_cast<size_t>(plan.context.ctx - ctx)};
}

Remedy absorbed_attention(const Plan& plan) { return {"mla_mode=absorbed", plan.expanded_bytes()}; }

Remedy fewer_sequences(const Plan& plan, size_t missing) {
  if (plan.context.sequences == 1) return {};
  const size_t each = plan.kv_bytes / static_cast<size_t>(plan.context.sequences);
  const auto fewer = static_cast<int64_t>((missing + each - 1) / std::max<size_t>(each, 1));
  const int64_t left = std::max<int64_t>(1, plan.context.sequences - fewer);
  return {str_cat("sequences=", left), each * static_cast<size_t>(plan.context.sequences - left)};
}

// The CPU reads weights that are not repacked from the file's own pages, if it is mapped.
Remedy weights_in_place(const Plan& plan, bool weights_loaded) {
  if (plan.main_device().kind == DeviceKind::cuda || weights_loaded || !(plan.load.cpu_repack && plan.load.mmap))
    return {};
  size_t frees = 0;
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.layout != ops::Layout::plain) frees += weight.bytes;
  }
  return {"cpu_repack=false", frees};
}

Remedy weights_mapped(const Plan& plan, bool weights_loaded) {
  if (plan.main_device().kind == DeviceKind::cuda || weights_loaded || plan.load.mmap) return {};
  size_t frees = 0;
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.mappable) frees += weight.bytes;
  }
  return {"mmap=true", frees};
}

// Only where every row holds whole blocks: latents of multi-head latent attention need not.
Remedy smaller_cache(const Plan& plan) {
  size_t now = 0, then = 0;
  const auto count = [&](int64_t row, DType type) {
    const size_t elements = static_cast<size_t>(row) / row_bytes(type, 32) * 32;
    now += static_cast<size_t>(row);
    then += std::min<size_t>(static_cast<size_t>(row), row_bytes(DType::q8_0, static_cast<int64_t>(elements)));
  };
  for (const KvLayer& layer : plan.kv) {
    if (layer.v_row_bytes == 0) return {};
    count(layer.k_row_bytes, plan.kv_type_k);
    count(layer.v_row_bytes, plan.kv_type_v);
  }
  if (then >= now) return {};
  return {"kv_type_k=kv_type_v=q8_0", plan.kv_bytes / now * (now - then)};
}

// Weights that are repacked, converted or transposed.
size_t copied_bytes(const Plan& plan) {
  size_t bytes = 0;
  for (const WeightPlacement& weight : plan.weights) {
    if (!weight.mapped) bytes = checked_add(bytes, weight.bytes, "the weights");
  }
  return bytes;
}

}  // namespace

void check_memory(const Plan& plan, size_t free_bytes, bool weights_loaded) {
  const bool gpu = plan.main_device().kind == DeviceKind::cuda;
  // Pages of the file that the CPU reads in place can be dropped at any time: no memory of this process.
  const size_t weights = gpu ? plan.weights_bytes : copied_bytes(plan);
  const size_t reserve = gpu ? kDeviceReserve : 0;
  size_t needed = weights_loaded ? 0 : checked_add(weights, reserve, "all memory");
  for (const size_t bytes : {plan.kv_bytes, plan.arena_bytes, plan.scratch_bytes}) {
    needed = checked_add(needed, bytes, "all memory");
  }
  if (needed <= free_bytes) return;
  const size_t missing = needed - free_bytes;
  std::vector<Remedy> remedies;
  for (Remedy& remedy :
       std::vector<Remedy>{smaller_ubatch(plan, missing), smaller_context(plan, missing),
                           fewer_sequences(plan, missing), smaller_cache(plan), absorbed_attention(plan),
                           weights_in_place(plan, weights_loaded), weights_mapped(plan, weights_loaded)}) {
    if (remedy.frees > 0) remedies.push_back(std::move(remedy));
  }
  std::string enough, all;
  size_t together = 0;
  for (const Remedy& remedy : remedies) {
    const std::string text = str_cat(remedy.text, " (frees ", mib(remedy.frees), ")");
    if (remedy.frees >= missing) enough += str_cat(enough.empty() ? "" : ", or ", text);
    all += str_cat(all.empty() ? "" : ", ", text);
    together += remedy.frees;
  }
  const std::string advice =
      !enough.empty()       ? str_cat("Use ", enough)
      : together >= missing ? str_cat("Use some of these together: ", all)
                            : str_cat("The settings cannot make it fit", all.empty() ? "" : str_cat(" (", all, ")"),
                                      ": use a smaller quantisation, a model of fewer layers, or ",
                                      gpu ? "a GPU with more memory" : "a machine with more memory");
  throw OutOfMemoryError(
      str_cat("[plan] ", gpu ? str_cat("device cuda:", plan.main_device().ordinal) : "this machine", " is ",
              mib(missing), " short: ", mib(free_bytes), " free, ", mib(needed), " needed (",
              weights_loaded ? "" : str_cat(gpu ? "weights " : "copied weights ", mib(weights), ", "), "KV cache ",
              mib(plan.kv_bytes), " for ctx=", plan.context.ctx, " x ", plan.context.sequences, " sequences, arena ",
              mib(plan.arena_bytes), " for ubatch=", plan.ubatch, ", workspace ", mib(plan.scratch_bytes),
              weights_loaded || !gpu ? "" : str_cat(", ", mib(reserve), " for the runtime"), "). ", advice));
}

}  // namespace dyno::plan
