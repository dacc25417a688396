// The expected time of a plan and the bytes that it moves. Each device has a clock, which its launches advance. A
// transfer makes the target device wait for the source device. So devices that do not wait for each other run
// concurrently. All CPU devices share one clock, because they share the CPU's threads. Copies of weights have a
// separate link, and launches wait for them.
//
// An op takes its launch time, plus the longer of its bytes at the memory's rate and its operations at the rate of
// products (the roofline of Williams, Waterman and Patterson, 2009). If the op itself was measured, the measured time
// is used instead.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// The rate of products with this many rows.
double flops_per_second(const Rates& rates, double rows);
// Bytes of matrices per second in products with few rows.
double weight_rate(const Rates& rates);
// Bytes per second of an op that is not a product, and reads and writes `bytes` in total.
double row_rate(const Rates& rates, double bytes);
// Rates from the device's properties alone, for devices without measured rates.
Rates assumed_rates(const DeviceInfo& device);

// An op that was measured with this many rows.
struct MeasuredOp {
  std::string key;
  int64_t rows = 0;
  auto operator<=>(const MeasuredOp&) const = default;
};

struct DeviceRates {
  Rates rates;
  std::map<MeasuredOp, double> measured;  // seconds per launch
};

// The link of a device: from the plan, else measured or assumed.
const Link& device_link(const Plan& plan, const std::vector<DeviceRates>& rates, DeviceId id);

// A u-batch of one sequence.
struct Load {
  int64_t tokens = 1;
  int64_t depth = 0;  // positions before it
  int64_t logit_rows = 1;
};

// Launches of one device in one layer (-1: before or after the layers).
struct CostPart {
  DeviceId device = kMainDevice;
  int32_t layer = -1;
  int launches = 0;
  size_t weight_bytes = 0;  // weights on this device
  double bytes = 0, flops = 0, seconds = 0;
  size_t transfer_bytes = 0;  // copied to the device, including copies of weights
  double transfer_seconds = 0;
};

struct PlanCost {
  std::vector<CostPart> parts;  // by layer, in the order of the launches
  double seconds = 0;           // until the last device has finished
  double transfer_seconds = 0;
  size_t transfer_bytes = 0;
};

// `rates`: one entry for each device of the plan.
PlanCost estimate(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates,
                  const Load& load);

}  // namespace dyno::plan
