#include "plan/cost.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "plan/expert_share.h"

namespace dyno::plan {

// Between the two rates by the logarithm of the rows.
double flops_per_second(const Rates& rates, int64_t rows) {
  if (rows >= kManyRows) return rates.flops_many;
  const double at = std::log(static_cast<double>(std::max<int64_t>(rows, 1))) / std::log(double{kManyRows});
  return std::exp(std::log(rates.flops_one) * (1 - at) + std::log(rates.flops_many) * at);
}

const Link& device_link(const Plan& plan, const std::vector<DeviceRates>& rates, DeviceId id) {
  const auto at = static_cast<size_t>(id);
  const Link& planned = plan.devices[at].link;
  return planned != Link{} ? planned : rates[at].rates.link;
}

namespace {

// Attention also reads what the cache holds already.
ops::Cost with_depth(const ops::OpDesc& desc, int64_t depth) {
  ops::Cost cost = ops::cost(desc);
  if (const auto* a = std::get_if<ops::AttentionDesc>(&desc)) {
    const auto keys = static_cast<double>(depth * a->kv_heads);
    cost.bytes += keys * static_cast<double>(row_bytes(a->k_type, a->dk));
    if (!a->v_in_k) cost.bytes += keys * static_cast<double>(row_bytes(a->v_type, a->dv));
    cost.flops += static_cast<double>(depth * a->m * a->heads) * static_cast<double>(a->dk + a->dv) * 2;
  }
  return cost;
}

class Estimate {
 public:
  Estimate(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates, const Load& load)
      : plan_(plan), model_(model), rates_(rates), load_(load) {
    DYNO_CHECK(PlanError, rates.size() == plan.devices.size(), "[plan] rates of ", rates.size(),
               " devices for a plan of ", plan.devices.size());
    DYNO_CHECK(PlanError, load.tokens >= 1 && load.depth >= 0, "[plan] a cost of ", load.tokens, " tokens at depth ",
               load.depth, "; expected 1 token or more, at depth 0 or more");
    for (const DeviceRates& one : rates) {
      const Rates& r = one.rates;
      DYNO_CHECK(PlanError, r.bytes_per_second > 0 && r.flops_one > 0 && r.flops_many > 0 && r.launch_seconds >= 0,
                 "[plan] a rate of a device is 0 or less: ", r.bytes_per_second, " bytes/s, ", r.flops_one, " and ",
                 r.flops_many, " operations/s, ", r.launch_seconds, " s a launch");
    }
  }

  PlanCost run() {
    const NodeList& list = plan_.list_for(load_.tokens);
    int64_t tokens = load_.tokens;
    for (size_t i = 0; i < list.nodes.size(); ++i) {
      add(list.nodes[i], tokens);
      // Only rows whose logits are wanted go on.
      if (static_cast<int32_t>(i) == list.select_node) tokens = std::min(tokens, load_.logit_rows);
      if (tokens == 0) break;
    }
    add_streamed(list);
    if (load_.logit_rows > 0 && !list.nodes.empty()) {
      const DeviceId from = list.nodes.back().device;
      if (plan_.device(from).kind == DeviceKind::cpu) {
        const auto bytes = static_cast<size_t>(std::min(load_.logit_rows, load_.tokens) * model_.n_vocab) * 4;
        cross(part(from, -1), bytes, transfer_seconds(link(from), {}, bytes));
      }
    }
    for (const WeightPlacement& weight : plan_.weights) part(weight.device, weight.layer).weight_bytes += weight.bytes;
    std::stable_sort(out_.parts.begin(), out_.parts.end(), [](const CostPart& a, const CostPart& b) {
      return std::pair(a.layer, a.device) < std::pair(b.layer, b.device);
    });
    return std::move(out_);
  }

 private:
  const Link& link(DeviceId id) const { return device_link(plan_, rates_, id); }

  // Of the rows of a product with experts, and of its bytes.
  double share_of(const Node& node) const {
    if (!node.divided || node.layer < 0 || plan_.shared_experts[static_cast<size_t>(node.layer)] == 0)
      return node.share;
    if (plan_.list_for(load_.tokens).id != ListId::streamed) return node.share;
    const model::FfnSpec& f = *model_.layers[static_cast<size_t>(node.layer)].mixture();
    const double cpu = even_share(plan_, rates_, model_, f, load_.tokens);
    return node.at_home ? cpu : 1 - cpu;
  }

  CostPart& part(DeviceId device, int32_t layer) {
    const auto found = std::find_if(out_.parts.begin(), out_.parts.end(),
                                    [&](const CostPart& p) { return p.device == device && p.layer == layer; });
    if (found != out_.parts.end()) return *found;
    return out_.parts.emplace_back(CostPart{.device = device, .layer = layer});
  }

  void cross(CostPart& part, size_t bytes, double seconds) {
    part.transfer_bytes += bytes;
    part.transfer_seconds += seconds;
    out_.transfer_bytes += bytes;
    out_.transfer_seconds += seconds;
    out_.seconds += seconds;
  }

  // Copies of weights cross while the layer before computes, so the slower of both sets the time. Of experts cross
  // those that tokens choose if they choose evenly.
  void add_streamed(const NodeList& list) {
    double bytes = 0, seconds = 0;
    for (const Fetch& fetch : list.fetches) {
      for (const model::WeightId id : fetch.weights) {
        const WeightPlacement& weight = plan_.weights[static_cast<size_t>(id)];
        double share = 1;
        if (fetch.ids != kNoValue && model_.weight(id).batch == fetch.experts) {
          const double left = 1 - static_cast<double>(fetch.used) / static_cast<double>(fetch.experts);
          share = 1 - std::pow(left, static_cast<double>(load_.tokens));
          share *= share_of(list.nodes[static_cast<size_t>(fetch.node)]);
          if (weight.stream.cached != model::kNone) {
            share *=
                1 - static_cast<double>(model_.weight(weight.stream.cached).batch) / static_cast<double>(fetch.experts);
          }
        }
        const double crossing = share * static_cast<double>(weight.bytes);
        bytes += crossing;
        seconds += transfer_seconds(link(weight.device), link(kMainDevice), static_cast<size_t>(crossing));
      }
    }
    out_.transfer_bytes += static_cast<size_t>(bytes);
    out_.transfer_seconds += seconds;
    out_.seconds = std::max(out_.seconds, seconds);
  }

  void add(const Node& node, int64_t tokens) {
    CostPart& at = part(node.device, node.layer);
    const DeviceRates& device = rates_[static_cast<size_t>(node.device)];
    if (const auto* moved = std::get_if<TransferOperands>(&node.operands)) {
      const Value& value = plan_.values[static_cast<size_t>(moved->x.value)];
      const size_t bytes = value.bytes_fixed + value.bytes_per_token * static_cast<size_t>(tokens);
      const double linked = transfer_seconds(link(value.device), link(node.device), bytes);
      // The copy itself runs while the link would.
      const double copy = 2 * static_cast<double>(bytes) / device.rates.bytes_per_second + device.rates.launch_seconds;
      cross(at, bytes, std::max(linked, copy));
      return;
    }
    const OpUse& use = plan_.keys[static_cast<size_t>(node.key)];
    const int64_t rows = tokens * node.rows_factor;
    ops::Cost cost = with_depth(ops::with_tokens(use.desc, rows), load_.depth);
    const double share = share_of(node);
    cost.bytes *= share;
    cost.flops *= share;
    double seconds =
        std::max(cost.bytes / device.rates.bytes_per_second, cost.flops / flops_per_second(device.rates, tokens)) +
        device.rates.launch_seconds;
    if (const auto known = device.measured.find({use.key, rows}); known != device.measured.end()) {
      seconds = known->second * share;
    }
    ++at.launches;
    at.bytes += cost.bytes;
    at.flops += cost.flops;
    at.seconds += seconds;
    out_.seconds += seconds;
  }

  const Plan& plan_;
  const model::ModelDesc& model_;
  const std::vector<DeviceRates>& rates_;
  Load load_;
  PlanCost out_;
};

}  // namespace

Rates assumed_rates(const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    // About what a card of that many multiprocessors has; a link of PCIe 4 with 16 lanes.
    const double share = std::max(device.sm_count, 1) / 100.0;
    return {.bytes_per_second = 1.5e12 * share,
            .flops_one = 2e13 * share,
            .flops_many = 2e14 * share,
            .launch_seconds = 3e-6,
            .link = {.bytes_per_second = 20e9, .latency_seconds = 10e-6}};
  }
  const double cores = std::max(device.cores, 1);
  const double wide = device.isa == CpuIsa::avx512_vnni ? 4 : device.isa == CpuIsa::avx2 ? 2 : 1;
  return {.bytes_per_second = std::min(8e9 * cores, 60e9),
          .flops_one = 12e9 * wide * cores,
          .flops_many = 30e9 * wide * cores,
          .launch_seconds = 2e-6,
          .link = {}};
}

PlanCost estimate(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates,
                  const Load& load) {
  return Estimate(plan, model, rates, load).run();
}

}  // namespace dyno::plan
