#include "plan/expert_share.h"

#include <algorithm>
#include <cmath>

#include "plan/auto_place.h"

namespace dyno::plan {

using model::WeightId;

namespace {

// Bytes, other than weights, that the CPU moves for each token, whichever experts it computes. The products write rows
// for all experts of a token, with zeros for experts of the other device, and quantise their inputs. A store also reads
// its cache line.
double row_bytes(const model::ModelDesc& model, const model::FfnSpec& f) {
  constexpr double kRead = sizeof(float), kStore = 2 * sizeof(float), kQuantised = 2;
  const double inner = static_cast<double>(model.weight(f.experts_down).cols), outer = model.n_embd;
  return outer * (kRead + kQuantised) +
         static_cast<double>(f.used) * (inner * (kStore + kRead + kQuantised) + outer * kStore);
}

}  // namespace

bool shares_experts(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f) {
  if (plan.offload.cpu_share == 0 || !model::can_cache_experts(model, f)) return false;
  for (const WeightId id : {f.experts_gate, f.experts_up, f.experts_down}) {
    if (id != model::kNone && !plan.streams(ListId::streamed, id)) return false;
  }
  return true;
}

int64_t experts_for_cpu(const Plan& plan, const std::vector<DeviceRates>& rates, const model::ModelDesc& model,
                        const model::FfnSpec& f, int64_t tokens, int64_t chosen, std::span<const int64_t> rows) {
  const auto most = static_cast<int64_t>(rows.size());
  if (plan.offload.cpu_share >= 0) return std::min(most, chosen * plan.offload.cpu_share / 100);
  const DeviceId home = plan.weights[static_cast<size_t>(f.experts_down)].device;
  const Rates& cpu = rates[static_cast<size_t>(home)].rates;
  double bytes = 0, multiplies = 0;  // of one expert with one row
  for (const WeightId id : {f.experts_gate, f.experts_up, f.experts_down}) {
    if (id == model::kNone) continue;
    const model::Weight& w = model.weight(id);
    bytes += static_cast<double>(plan.weights[static_cast<size_t>(id)].bytes) / static_cast<double>(f.experts);
    multiplies += 2 * static_cast<double>(w.rows * w.cols * w.batch) / static_cast<double>(f.experts);
  }
  const auto crossing = [&](double count) {
    return transfer_seconds(device_link(plan, rates, home), device_link(plan, rates, kMainDevice),
                            static_cast<size_t>(count));
  };
  const double linked =
      crossing(bytes * static_cast<double>(chosen)) / static_cast<double>(std::max<int64_t>(1, chosen));
  // The rows move to the CPU first, and their sums back at the end.
  const double rows_alone = 2 * crossing(static_cast<double>(tokens * model.n_embd) * sizeof(float)) +
                            static_cast<double>(tokens) * row_bytes(model, f) / cpu.bytes_per_second;
  double computed = rows_alone;
  int64_t taken = 0;
  for (; taken < most; ++taken) {
    const int64_t count = rows[static_cast<size_t>(taken)];
    computed += std::max(bytes / weight_rate(cpu),
                         multiplies * static_cast<double>(count) / flops_per_second(cpu, static_cast<double>(count)));
    if (computed > linked * static_cast<double>(chosen - taken - 1)) break;
  }
  // The transfer of rows overlaps with nothing, because the layer's sum waits for it.
  return linked * static_cast<double>(taken) > rows_alone ? taken : 0;
}

int64_t experts_for_cpu(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f, int64_t tokens,
                        int64_t chosen, std::span<const int64_t> rows) {
  return experts_for_cpu(plan, rates_for(plan, plan.load.placement.rates), model, f, tokens, chosen, rows);
}

double even_share(const Plan& plan, const std::vector<DeviceRates>& rates, const model::ModelDesc& model,
                  const model::FfnSpec& f, int64_t tokens) {
  const double left = 1 - static_cast<double>(f.used) / static_cast<double>(f.experts);
  const double expected = static_cast<double>(f.experts) * (1 - std::pow(left, static_cast<double>(tokens)));
  const int64_t chosen = std::max<int64_t>(1, std::llround(expected));
  const std::vector<int64_t> rows(static_cast<size_t>(chosen), std::max<int64_t>(1, tokens * f.used / chosen));
  return static_cast<double>(experts_for_cpu(plan, rates, model, f, tokens, chosen, rows)) /
         static_cast<double>(chosen);
}

}  // namespace dyno::plan
