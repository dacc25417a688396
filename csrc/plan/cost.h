// How long a plan is expected to take, and how many bytes it moves. Each device has a clock, which its launches move
// on. A transfer lets the device that it goes to wait for the one that it comes from. So two devices that do not wait
// for each other count once. All devices of the CPU share a clock, as they share its threads. Copies of weights have a
// link of their own, and launches wait for them.
//
// An op takes the longer of its bytes at the memory's rate and its operations at the rate of products (the roofline of
// Williams, Waterman and Patterson, 2009), and a launch beside. Where the op itself was measured, that time stands
// instead.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// Of products with so many rows.
double flops_per_second(const Rates& rates, double rows);
// Bytes of matrices a second that products with few rows read.
double weight_rate(const Rates& rates);
// Bytes a second that an op reads and writes which is no product, and which has so many bytes.
double row_rate(const Rates& rates, double bytes);
// By the device's properties alone: for want of measured ones.
Rates assumed_rates(const DeviceInfo& device);

// An op that was measured with so many rows.
struct MeasuredOp {
  std::string key;
  int64_t rows = 0;
  auto operator<=>(const MeasuredOp&) const = default;
};

struct DeviceRates {
  Rates rates;
  std::map<MeasuredOp, double> measured;  // seconds of a launch
};

// The link of a device: the plan's, or else a measured or assumed one.
const Link& device_link(const Plan& plan, const std::vector<DeviceRates>& rates, DeviceId id);

// A u-batch of one sequence.
struct Load {
  int64_t tokens = 1;
  int64_t depth = 0;  // positions before it
  int64_t logit_rows = 1;
};

// Launches of one device in one layer (-1: before and behind the layers).
struct CostPart {
  DeviceId device = kMainDevice;
  int32_t layer = -1;
  int launches = 0;
  size_t weight_bytes = 0;  // that lie there
  double bytes = 0, flops = 0, seconds = 0;
  size_t transfer_bytes = 0;  // that come to the device, copies of weights among them
  double transfer_seconds = 0;
};

struct PlanCost {
  std::vector<CostPart> parts;  // by layer, in the order of the launches
  double seconds = 0;           // until the last device has ended
  double transfer_seconds = 0;
  size_t transfer_bytes = 0;
};

// `rates`: of each device of the plan.
PlanCost estimate(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates,
                  const Load& load);

}  // namespace dyno::plan
