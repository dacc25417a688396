#include "plan/cost.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/error.h"
#include "plan/expert_share.h"

namespace dyno::plan {

// Interpolates between the two rates by the logarithm of the rows.
double flops_per_second(const Rates& rates, double rows) {
  if (rows >= kManyRows) return rates.flops_many;
  const double at = std::log(std::max(rows, 1.0)) / std::log(double{kManyRows});
  return std::exp(std::log(rates.flops_one) * (1 - at) + std::log(rates.flops_many) * at);
}

double weight_rate(const Rates& rates) {
  return rates.weight_bytes_per_second > 0 ? rates.weight_bytes_per_second : rates.bytes_per_second;
}

// An op that is not a product gives each thread at least some KiB. So a few rows are the work of one thread.
double row_rate(const Rates& rates, double bytes) {
  constexpr double kThreadBytes = 64 << 10;
  if (rates.core_bytes_per_second <= 0) return rates.bytes_per_second;
  return std::min(rates.bytes_per_second, rates.core_bytes_per_second * std::max(1.0, bytes / kThreadBytes));
}

const Link& device_link(const Plan& plan, const std::vector<DeviceRates>& rates, DeviceId id) {
  const auto at = static_cast<size_t>(id);
  const Link& planned = plan.devices[at].link;
  return planned != Link{} ? planned : rates[at].rates.link;
}

namespace {

// Attention also reads the part of the cache that is already there.
ops::Cost with_depth(const ops::OpDesc& desc, int64_t depth) {
  ops::Cost cost = ops::cost(desc);
  if (const auto* a = std::get_if<ops::AttentionDesc>(&desc)) {
    if (a->selected > 0) depth = std::min(depth, a->selected);
    const auto keys = static_cast<double>(depth * a->kv_heads);
    cost.bytes += keys * static_cast<double>(row_bytes(a->k_type, a->dk));
    if (!a->v_in_k) cost.bytes += keys * static_cast<double>(row_bytes(a->v_type, a->dv));
    cost.flops += static_cast<double>(depth * a->m * a->heads) * static_cast<double>(a->dk + a->dv) * 2;
  } else if (const auto* x = std::get_if<ops::IndexSelectDesc>(&desc); x != nullptr && depth > x->selected) {
    cost.bytes += static_cast<double>(depth * x->dk) * 4;
    cost.flops += static_cast<double>(depth * x->m) * static_cast<double>(x->heads * x->dk) * 2;
  }
  return cost;
}

// Whether the op reads matrices.
bool is_product(const ops::OpDesc& desc) {
  switch (ops::family_of(desc)) {
    case ops::Family::matmul:
    case ops::Family::matmul_id:
    case ops::Family::up_gate:
    case ops::Family::moe_up_gate:
    case ops::Family::qkv:
    case ops::Family::moe_down_sum:
    case ops::Family::qkv_rope_store:
    case ops::Family::norm_route:
      return true;
    default:
      return false;
  }
}

bool is_of_experts(const ops::OpDesc& desc) {
  const ops::Family family = ops::family_of(desc);
  return family == ops::Family::matmul_id || family == ops::Family::moe_up_gate || family == ops::Family::moe_down_sum;
}

// Extra time of a transfer, in addition to its latency and bytes. A GPU copies the few rows of a token in one block,
// which reads 8 KiB of host memory and waits for them before it reads more (runtime/cuda/turns.cu). So each 8 KiB cost
// a round trip over the bus, about 1.2 microseconds over PCIe. More bytes are copied by the driver.
double trip_seconds(size_t bytes, bool first) {
  constexpr size_t kPass = size_t{8} << 10, kMost = size_t{64} << 10;
  constexpr double kTrip = 1.2e-6;
  if (bytes == 0 || bytes > kMost) return 0;
  const size_t passes = (bytes + kPass - 1) / kPass;
  return static_cast<double>(passes - (first ? 1 : 0)) * kTrip;
}

// Rows that are multiplied by the same matrix: an expert gets a part of the tokens.
double rows_of_matrix(const ops::OpDesc& desc, int64_t tokens) {
  const auto rows = static_cast<double>(tokens);
  return std::visit(
      [&]<typename D>(const D& d) {
        if constexpr (std::is_same_v<D, ops::MatmulIdDesc> || std::is_same_v<D, ops::MoeUpGateDesc> ||
                      std::is_same_v<D, ops::MoeDownSumDesc>) {
          return std::max(1.0, rows * static_cast<double>(d.used) / static_cast<double>(d.experts));
        }
        return rows;
      },
      desc);
}

double launch_seconds(const Rates& rates, const ops::OpDesc& desc, const ops::Cost& cost, int64_t tokens) {
  const bool product = is_product(desc);
  const double read = product ? weight_rate(rates) : row_rate(rates, cost.bytes);
  return std::max(cost.bytes / read, cost.flops / flops_per_second(rates, rows_of_matrix(desc, tokens))) +
         rates.launch_seconds + (product ? rates.spread_seconds : 0) + (is_of_experts(desc) ? rates.expert_seconds : 0);
}

class Estimate {
 public:
  Estimate(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates, const Load& load)
      : plan_(plan), model_(model), rates_(rates), load_(load), clocks_(rates.size()) {
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
    size_t fetched = 0;
    for (size_t i = 0; i < list.nodes.size(); ++i) {
      if (list.nodes[i].for_cpu_share && cpu_share(list.nodes[i].layer) == 0) continue;
      for (; fetched < list.fetches.size() && list.fetches[fetched].node == static_cast<int32_t>(i); ++fetched) {
        fetch(list, fetched);
      }
      add(list, i, tokens);
      // Only rows whose logits are wanted continue.
      if (static_cast<int32_t>(i) == list.select_node) tokens = std::min(tokens, load_.logit_rows);
      if (tokens == 0) break;
    }
    if (load_.logit_rows > 0 && !list.nodes.empty()) {
      const DeviceId from = list.nodes.back().device;
      if (plan_.device(from).kind == DeviceKind::cpu) {
        const auto bytes = static_cast<size_t>(std::min(load_.logit_rows, load_.tokens) * model_.n_vocab) * 4;
        const double seconds = transfer_seconds(link(from), {}, bytes);
        count_transfer(part(from, -1), bytes, seconds);
        clock(from) += seconds;
      }
    }
    for (const WeightPlacement& weight : plan_.weights) part(weight.device, weight.layer).weight_bytes += weight.bytes;
    std::stable_sort(out_.parts.begin(), out_.parts.end(), [](const CostPart& a, const CostPart& b) {
      return std::pair(a.layer, a.device) < std::pair(b.layer, b.device);
    });
    out_.seconds = *std::max_element(clocks_.begin(), clocks_.end());
    return std::move(out_);
  }

 private:
  const Link& link(DeviceId id) const { return device_link(plan_, rates_, id); }
  bool is_gpu(DeviceId id) const { return plan_.device(id).kind == DeviceKind::cuda; }

  // The time at which the device has finished all launches so far. CPU devices share one clock, because they share
  // threads.
  double& clock(DeviceId id) {
    if (is_gpu(id)) return clocks_[static_cast<size_t>(id)];
    size_t first = 0;
    while (is_gpu(static_cast<DeviceId>(first))) ++first;
    return clocks_[first];
  }

  // The share of the rows, and of the bytes, of a product of experts.
  double share_of(const Node& node) const {
    if (!node.divided || node.layer < 0 || plan_.shared_experts[static_cast<size_t>(node.layer)] == 0)
      return node.share;
    if (!is_streamed(plan_.list_for(load_.tokens).id)) return node.share;
    const double cpu = cpu_share(node.layer);
    return node.at_home ? cpu : 1 - cpu;
  }

  double cpu_share(int32_t layer) const {
    const model::FfnSpec& f = *model_.layers[static_cast<size_t>(layer)].mixture();
    return even_share(plan_, rates_, model_, f, load_.tokens);
  }

  CostPart& part(DeviceId device, int32_t layer) {
    const auto found = std::find_if(out_.parts.begin(), out_.parts.end(),
                                    [&](const CostPart& p) { return p.device == device && p.layer == layer; });
    if (found != out_.parts.end()) return *found;
    return out_.parts.emplace_back(CostPart{.device = device, .layer = layer});
  }

  void count_transfer(CostPart& part, size_t bytes, double seconds) {
    part.transfer_bytes += bytes;
    part.transfer_seconds += seconds;
    out_.transfer_bytes += bytes;
    out_.transfer_seconds += seconds;
  }

  // Bytes of a streamed weight that are copied. For experts: those that tokens choose if they choose evenly.
  size_t crossing(const NodeList& list, const Fetch& fetch, model::WeightId id) const {
    const WeightPlacement& weight = plan_.weights[static_cast<size_t>(id)];
    if (fetch.ids == kNoValue || model_.weight(id).batch != fetch.experts) return weight.bytes;
    const double left = 1 - static_cast<double>(fetch.used) / static_cast<double>(fetch.experts);
    double share = 1 - std::pow(left, static_cast<double>(load_.tokens));
    share *= share_of(list.nodes[static_cast<size_t>(fetch.node)]);
    if (weight.stream.cached != model::kNone) {
      share *= 1 - static_cast<double>(model_.weight(weight.stream.cached).batch) / static_cast<double>(fetch.experts);
    }
    return static_cast<size_t>(share * static_cast<double>(weight.bytes));
  }

  // Starts the copies of all fetches of a layer, one after the other, when the link is free.
  void begin_copies(const NodeList& list, int32_t order) {
    for (size_t i = 0; i < list.fetches.size(); ++i) {
      if (list.fetches[i].order != order) continue;
      for (const model::WeightId id : list.fetches[i].weights) {
        const WeightPlacement& weight = plan_.weights[static_cast<size_t>(id)];
        const size_t bytes = crossing(list, list.fetches[i], id);
        const double seconds = bytes == 0 ? 0 : transfer_seconds(link(weight.device), link(kMainDevice), bytes);
        copied_ = std::max(copied_, clock(kMainDevice)) + seconds;
        count_transfer(part(kMainDevice, weight.layer), bytes, seconds);
      }
      copied_by_[i] = copied_;
    }
  }

  // As in WeightStream: copies of a layer start at the first fetch of the previous layer; the copies of the first layer
  // start at its own fetch.
  void fetch(const NodeList& list, size_t index) {
    const int32_t order = list.fetches[index].order;
    if (index == 0) {
      copied_by_.resize(list.fetches.size());
      begin_copies(list, order);
    }
    if (index == 0 || list.fetches[index - 1].order != order) begin_copies(list, order + 1);
    double& main = clock(kMainDevice);
    main = std::max(main, copied_by_[index]);
  }

  // Values that move to one device together cost one wait. Virtual links copy them one by one.
  void transfer(const NodeList& list, size_t index, int64_t tokens) {
    const auto ends = [&](const Node& node) {
      const auto& moved = std::get<TransferOperands>(node.operands);
      return std::pair(plan_.values[static_cast<size_t>(moved.x.value)].device,
                       plan_.values[static_cast<size_t>(moved.y.value)].device);
    };
    const Node& node = list.nodes[index];
    const auto [from, to] = ends(node);
    const Value& value = plan_.values[static_cast<size_t>(std::get<TransferOperands>(node.operands).x.value)];
    const size_t bytes = value.bytes_fixed + value.bytes_per_token * static_cast<size_t>(tokens);
    const Rates& rates = rates_[static_cast<size_t>(node.device)].rates;
    // The copy itself runs concurrently with the link.
    const double moved = 2 * static_cast<double>(bytes);
    const double copy = moved / row_rate(rates, moved) + rates.launch_seconds;
    const Node* before = index > 0 ? &list.nodes[index - 1] : nullptr;
    const bool joins = is_gpu(node.device) && before != nullptr &&
                       std::holds_alternative<TransferOperands>(before->operands) &&
                       ends(*before) == std::pair(from, to);
    double linked = transfer_seconds(link(from), link(to), bytes);
    if (joins) linked -= transfer_seconds(link(from), link(to), 0);
    if (load_.tokens == 1 && is_gpu(to) && !is_gpu(from)) linked += trip_seconds(bytes, !joins);
    const double seconds = joins ? linked : std::max(linked, copy);
    count_transfer(part(to, node.layer), bytes, seconds);
    const double sent = clock(from) + seconds;
    clock(to) = std::max(clock(to), sent);
  }

  void add(const NodeList& list, size_t index, int64_t tokens) {
    const Node& node = list.nodes[index];
    if (std::holds_alternative<TransferOperands>(node.operands)) return transfer(list, index, tokens);
    CostPart& at = part(node.device, node.layer);
    const DeviceRates& device = rates_[static_cast<size_t>(node.device)];
    const OpUse& use = plan_.keys[static_cast<size_t>(node.key)];
    const int64_t rows = tokens * node.rows_factor;
    ops::Cost cost = with_depth(ops::with_tokens(use.desc, rows), load_.depth);
    const double share = share_of(node);
    cost.bytes *= share;
    cost.flops *= share;
    double seconds = launch_seconds(device.rates, use.desc, cost, tokens);
    if (const auto known = device.measured.find({use.key, rows}); known != device.measured.end()) {
      seconds = known->second * share;
    }
    ++at.launches;
    at.bytes += cost.bytes;
    at.flops += cost.flops;
    at.seconds += seconds;
    clock(node.device) += seconds;
  }

  const Plan& plan_;
  const model::ModelDesc& model_;
  const std::vector<DeviceRates>& rates_;
  Load load_;
  std::vector<double> clocks_;     // by device
  double copied_ = 0;              // the time at which the link has finished all copies so far
  std::vector<double> copied_by_;  // by fetch: the time at which its copies are complete
  PlanCost out_;
};

}  // namespace

Rates assumed_rates(const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    // Roughly a card with that many multiprocessors, and a PCIe 4 link with 16 lanes.
    const double share = std::max(device.sm_count, 1) / 100.0;
    return {.bytes_per_second = 1.5e12 * share,
            .flops_one = 2e13 * share,
            .flops_many = 2e14 * share,
            .launch_seconds = 3e-6,
            .expert_seconds = 3e-6,
            .link = {.bytes_per_second = 20e9, .latency_seconds = 10e-6}};
  }
  const double cores = std::max(device.cores, 1);
  const double wide = device.isa == CpuIsa::avx512_vnni ? 4 : device.isa == CpuIsa::avx2 ? 2 : 1;
  return {.bytes_per_second = std::min(8e9 * cores, 60e9),
          .core_bytes_per_second = 15e9,
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
