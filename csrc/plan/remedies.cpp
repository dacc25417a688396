#include "plan/remedies.h"

#include <algorithm>

#include "core/error.h"

namespace dyno::plan {
namespace {

// Smaller values would not be useful.
constexpr int64_t kLeastUbatch = 32;
constexpr int64_t kLeastContext = 256;

// The largest power of two below the u-batch that frees enough, else the smallest one. Memory is proportional to the
// tokens.
Remedy smaller_ubatch(const Plan& plan, const Holder& holder, size_t missing) {
  const size_t fixed = std::min(plan.expanded_bytes(), holder.arena_bytes);
  const size_t per_token = (holder.arena_bytes - fixed) / static_cast<size_t>(plan.ubatch);
  Remedy found;
  for (int64_t u = kLeastUbatch; u < plan.ubatch; u *= 2) {
    const size_t frees = per_token * static_cast<size_t>(plan.ubatch - u);
    if (found.text.empty() || frees >= missing) found = {str_cat("ubatch=", u), frees};
  }
  return found;
}

// With fewer positions, the default may become full rows, which need more memory.
std::string with_windows(const Plan& plan) { return plan.cache_window() > 0 ? " with window_cache=window" : ""; }

Remedy smaller_context(const Plan& plan, const Holder& holder, size_t missing) {
  // Layers that keep only their window need as much memory with a shorter context.
  size_t per_position = 0;
  for (const KvLayer& layer : plan.kv) {
    if (layer.window > 0 || (holder.device && layer.device != *holder.device)) continue;
    per_position += static_cast<size_t>((layer.k_row_bytes + layer.v_row_bytes) * plan.context.sequences);
  }
  const bool shared = plan.context.cache_tokens > 0;  // all sequences share the limit, whatever their length
  if (shared || per_position == 0 || plan.context.ctx <= kLeastContext) return {};
  const auto fewer = static_cast<int64_t>((missing + per_position - 1) / per_position);
  const int64_t ctx = std::max(kLeastContext, (plan.context.ctx - fewer) / kLeastContext * kLeastContext);
  return {str_cat("ctx=", ctx, with_windows(plan)), per_position * static_cast<size_t>(plan.context.ctx - ctx)};
}

Remedy absorbed_attention(const Plan& plan, const Holder& holder) {
  return {"mla_mode=absorbed", std::min(plan.expanded_bytes(), holder.arena_bytes)};
}

// Bytes of the holder's cache that another context frees. They are not proportional to the tokens, because each
// sequence has additional pages.
size_t freed_cache(const Plan& plan, const Holder& holder, const ContextOptions& then) {
  size_t frees = 0;
  for (const KvLayer& layer : plan.kv) {
    if (holder.device && layer.device != *holder.device) continue;
    for (const int64_t row : {layer.k_row_bytes, layer.v_row_bytes}) {
      const size_t now = kv_memory(plan, plan.context, layer, row);
      frees += now - std::min(now, kv_memory(plan, then, layer, row));
    }
  }
  return frees;
}

// The largest number of sequences that frees enough, or one.
Remedy fewer_sequences(const Plan& plan, const Holder& holder, size_t missing) {
  const size_t state = holder.state_bytes / static_cast<size_t>(plan.context.sequences);
  Remedy found;
  for (int64_t left = plan.context.sequences - 1; left >= 1 && found.frees < missing; --left) {
    ContextOptions then = plan.context;
    then.sequences = left;
    const size_t frees = freed_cache(plan, holder, then) + state * static_cast<size_t>(plan.context.sequences - left);
    found = {str_cat("sequences=", left, with_windows(plan)), frees};
  }
  return found;
}

// Sequences use memory only for their positions, so a limit below their maximum may be enough.
Remedy fewer_cache_tokens(const Plan& plan, const Holder& holder, size_t missing) {
  const ContextOptions& c = plan.context;
  const int64_t now = c.cache_tokens > 0 ? c.cache_tokens : c.ctx * c.sequences;
  if (c.sequences == 1 || now <= c.ctx || !plan.maps_cache()) return {};
  const auto frees = [&](int64_t tokens) {
    ContextOptions then = c;
    then.cache_tokens = tokens;
    return freed_cache(plan, holder, then);
  };
  // The largest value that frees enough, in steps of kLeastContext. Smaller values free more.
  int64_t enough = (c.ctx + kLeastContext - 1) / kLeastContext, too_many = now / kLeastContext + 1;
  while (too_many - enough > 1) {
    const int64_t middle = enough + (too_many - enough) / 2;
    (frees(middle * kLeastContext) >= missing ? enough : too_many) = middle;
  }
  const int64_t left = std::max(c.ctx, std::min(now, enough * kLeastContext));
  return {str_cat("cache_tokens=", left, " for all sequences together", with_windows(plan)), frees(left)};
}

// Layers with a sliding window keep only their window. Sequences can then no longer return to any position.
Remedy windows_alone(const Plan& plan, const Holder& holder) {
  if (plan.cache_window() > 0 || !plan.maps_cache()) return {};
  Plan then = plan;
  for (KvLayer& layer : then.kv) layer.window = layer.reads;
  size_t frees = 0;
  for (size_t i = 0; i < plan.kv.size(); ++i) {
    if (holder.device && plan.kv[i].device != *holder.device) continue;
    for (const int64_t row : {plan.kv[i].k_row_bytes, plan.kv[i].v_row_bytes}) {
      const size_t now = kv_memory(plan, plan.context, plan.kv[i], row);
      frees += now - std::min(now, kv_memory(then, plan.context, then.kv[i], row));
    }
  }
  return {"window_cache=window", frees};
}

// Possible only if every row consists of whole blocks, which latents of multi-head latent attention may not.
Remedy smaller_cache(const Plan& plan, const Holder& holder) {
  size_t now = 0, then = 0;
  const auto count = [&](int64_t row, DType type) {
    const size_t elements = static_cast<size_t>(row) / row_bytes(type, 32) * 32;
    now += static_cast<size_t>(row);
    then += std::min<size_t>(static_cast<size_t>(row), row_bytes(DType::q8_0, static_cast<int64_t>(elements)));
  };
  for (const KvLayer& layer : plan.kv) {
    if (layer.k_row_bytes > 0 && (layer.v_row_bytes == 0 || layer.v_is_index)) return {};
    if (holder.device && layer.device != *holder.device) continue;
    count(layer.k_row_bytes, plan.kv_type_k);
    count(layer.v_row_bytes, plan.kv_type_v);
  }
  if (now == 0 || then >= now) return {};
  return {"kv_type_k=kv_type_v=q8_0", holder.kv_bytes / now * (now - then)};
}

template <typename Counts>
size_t bytes_of_weights(const Plan& plan, const Counts& counts) {
  size_t bytes = 0;
  for (const WeightPlacement& weight : plan.weights) bytes += counts(weight) ? weight.bytes * weight.copies : 0;
  return bytes;
}

// If the file is mapped, the CPU reads weights without repacking from the file's pages.
Remedy weights_in_place(const Plan& plan, const Holder& holder) {
  if (holder.gpu || holder.device || !(plan.load.cpu_repack && plan.load.mmap)) return {};
  if (plan.numa_nodes() > 1) return {};  // nothing is read in place then
  const auto repacked = [&](const WeightPlacement& weight) {
    const DeviceInfo& device = plan.device(weight.device);
    return weight.layout != ops::Layout::plain && device.kind == DeviceKind::cpu && device.ordinal == 0;
  };
  return {"cpu_repack=false", bytes_of_weights(plan, repacked)};
}

Remedy weights_mapped(const Plan& plan, const Holder& holder) {
  if (holder.gpu || holder.device || plan.load.mmap || plan.numa_nodes() > 1) return {};
  return {"mmap=true", bytes_of_weights(plan, [](const WeightPlacement& weight) { return weight.mappable; })};
}

// One copy of the weights instead of one on each node.
Remedy one_copy(const Plan& plan, const Holder& holder) {
  if (holder.gpu) return {};
  size_t frees = 0;
  for (const WeightPlacement& weight : plan.weights) {
    if (!holder.device || weight.device == *holder.device) frees += weight.bytes * (weight.copies - 1);
  }
  return {"numa=interleave", frees};
}

// Fewer cached experts on the main device.
Remedy smaller_expert_cache(const Plan& plan, const Holder& holder, size_t missing) {
  if (holder.device != kMainDevice || plan.cached_bytes == 0) return {};
  const size_t left = (plan.cached_bytes - std::min(plan.cached_bytes, missing)) >> 20;
  return {str_cat("expert_cache_mib=", left), plan.cached_bytes - std::min(plan.cached_bytes, left << 20)};
}

// The smallest number of layers whose experts, or which as a whole, must move from the main device to the CPU.
Remedy weights_on_the_cpu(const Plan& plan, const Holder& holder, size_t missing) {
  if (holder.device != kMainDevice || !has_cpu_beside(plan)) return {};
  const auto layers = plan.kv.size();
  std::vector<size_t> experts(layers), whole(layers);
  for (const WeightPlacement& weight : plan.weights) {
    if (weight.device != kMainDevice || weight.layer < 0) continue;
    const auto layer = static_cast<size_t>(weight.layer);
    whole[layer] += weight.bytes;
    if (weight.experts) experts[layer] += weight.bytes;
  }
  size_t frees = 0;
  if (std::any_of(experts.begin(), experts.end(), [](size_t bytes) { return bytes > 0; })) {
    size_t n = 0;
    while (n < layers && frees < missing) frees += experts[n++];
    return {str_cat("n_cpu_moe=", n), frees};
  }
  size_t n = 0;
  for (; n < layers && frees < missing; ++n) {
    const KvLayer& layer = plan.kv[n];
    frees += whole[n];
    if (layer.device != kMainDevice) continue;
    for (const int64_t row : {layer.k_row_bytes, layer.v_row_bytes}) {
      frees += kv_memory(plan, plan.context, layer, row);
    }
  }
  // The output counts as one of the layers that stay.
  return {str_cat("n_gpu_layers=", layers + 1 - n), frees};
}

}  // namespace

bool has_cpu_beside(const Plan& plan) {
  // Every GPU has a CPU, even in a plan that uses no CPU memory.
  if (plan.main_device().kind == DeviceKind::cuda) return true;
  return plan.main_device().ordinal > 0;
}

std::vector<Remedy> remedies(const Plan& plan, const Holder& holder, size_t missing, bool weights_loaded) {
  std::vector<Remedy> all = {smaller_ubatch(plan, holder, missing),
                             smaller_context(plan, holder, missing),
                             fewer_sequences(plan, holder, missing),
                             fewer_cache_tokens(plan, holder, missing),
                             windows_alone(plan, holder),
                             smaller_cache(plan, holder),
                             absorbed_attention(plan, holder)};
  if (!weights_loaded) {
    all.push_back(weights_in_place(plan, holder));
    all.push_back(weights_mapped(plan, holder));
    all.push_back(one_copy(plan, holder));
    all.push_back(smaller_expert_cache(plan, holder, missing));
    all.push_back(weights_on_the_cpu(plan, holder, missing));
  }
  std::erase_if(all, [](const Remedy& remedy) { return remedy.frees == 0; });
  return all;
}

}  // namespace dyno::plan
