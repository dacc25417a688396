#include "bindings/ops_time.h"

#include <chrono>

#include "bindings/cuda_launch.h"
#include "bindings/launch_context.h"
#include "bindings/ops_convert.h"
#include "bindings/synthetic_args.h"
#include "ops/attention/attention.h"
#include "ops/copy/copy.h"
#include "ops/embed/embed.h"
#include "ops/glu/glu.h"
#include "ops/kv_store/kv_store.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul_id/matmul_id.h"
#include "ops/mla_expand/mla_expand.h"
#include "ops/moe_down_sum/moe_down_sum.h"
#include "ops/moe_route/moe_route.h"
#include "ops/moe_sum/moe_sum.h"
#include "ops/moe_up_gate/moe_up_gate.h"
#include "ops/norm/norm.h"
#include "ops/norm_route/norm_route.h"
#include "ops/qkv/qkv.h"
#include "ops/qkv_rope_store/qkv_rope_store.h"
#include "ops/rope/rope.h"
#include "ops/sample/sample.h"
#include "ops/up_gate/up_gate.h"

namespace nb = nanobind;

namespace dyno {
namespace {

constexpr size_t kMinLaunches = 5;
constexpr size_t kMaxLaunches = 200'000;

// More copies bring nothing: the caches are cold long before.
constexpr int64_t kMaxCopies = 256;

#ifdef DYNO_HAVE_CUDA
// In one graph: its start is shared by them.
constexpr size_t kLeastCaptured = 16;
#endif

// Calls launch_copy(i) for copies in turn; see time_op().
template <typename Launch>
std::vector<double> measure(double min_seconds, size_t copies, const Launch& launch_copy) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  size_t at = 0;
  // Touch every copy once, and go on for a tenth of the time: clocks and branch predictors settle.
  const Clock::time_point warm = Clock::now();
  do {
    launch_copy(at++ % copies);
  } while (at < copies || (seconds(Clock::now() - warm) < 0.1 * min_seconds && at < kMaxLaunches));
  std::vector<double> samples;
  double total = 0;
  while ((total < min_seconds || samples.size() < kMinLaunches) && samples.size() < kMaxLaunches) {
    const size_t copy = at++ % copies;
    const Clock::time_point start = Clock::now();
    launch_copy(copy);
    samples.push_back(seconds(Clock::now() - start));
    total += samples.back();
  }
  return samples;
}

}  // namespace

std::vector<double> time_op(std::string_view family_text, const nb::dict& desc_dict,
                            const std::optional<nb::dict>& config_dict, int threads, double min_seconds,
                            int64_t rotate_bytes, uint64_t seed, int64_t depth, std::string_view isa,
                            std::string_view device_text) {
  const ops::Family family = ops::family_from_name(family_text);
  const ops::OpDesc desc = desc_from_dict(family, desc_dict);
  const DeviceInfo device = device_from_name(device_text, isa);
  const ops::Config config = config_dict ? config_from_dict(family, *config_dict) : ops::default_config(desc, device);
  const ops::Support support = ops::supports(desc, config, device);
  DYNO_CHECK(UnsupportedError, support.ok, "[", family_text, "] ", support.reason);
  DYNO_CHECK(PlanError, min_seconds >= 0 && min_seconds <= 3600, "[time] min_seconds=", min_seconds, "; 0 to 3600");
  DYNO_CHECK(PlanError, rotate_bytes >= 0 && rotate_bytes <= device.memory_bytes / 2,
             "[time] rotate_bytes=", rotate_bytes, " is more than half of the memory, ", device.memory_bytes, " bytes");
  DYNO_CHECK(PlanError, depth >= 0 && depth < (int64_t{1} << 30), "[time] depth=", depth, " positions; 0 to 2^30");

  const nb::gil_scoped_release unlocked;
  return std::visit(
      [&]<typename D>(const D& d) -> std::vector<double> {
        if constexpr (requires(SyntheticArgs& owner) { owner.make(d); }) {
          using Args = decltype(std::declval<SyntheticArgs&>().make(d));
          const auto make_copies = [&](SyntheticArgs& owner) {
            std::vector<Args> copies;
            do {
              copies.push_back(owner.make(d));
            } while (owner.bytes() < rotate_bytes && static_cast<int64_t>(copies.size()) < kMaxCopies);
            return copies;
          };
          if (device.kind == DeviceKind::cpu) {
            if constexpr (requires(const Args& a, ops::CpuContext& c) { ops::launch(config, d, a, c); }) {
              LaunchContext launcher(ops::scratch_bytes(desc, config), threads, device.isa);
              SyntheticArgs owner(seed, depth);
              const std::vector<Args> copies = make_copies(owner);
              return measure(min_seconds, copies.size(),
                             [&](size_t copy) { ops::launch(config, d, copies[copy], launcher.context()); });
            }
          }
#ifdef DYNO_HAVE_CUDA
          if (device.kind == DeviceKind::cuda) {
            if constexpr (requires(const Args& a, ops::CudaStream& c) { ops::launch(config, d, a, c); }) {
              CudaTimer timer(device, desc, config);
              SyntheticArgs owner(seed, depth,
                                  [&](const std::byte* host, size_t bytes) { return timer.upload(host, bytes); });
              const std::vector<Args> copies = make_copies(owner);
              const size_t launches = std::max<size_t>(copies.size(), kLeastCaptured);
              return timer.time(
                  [&] {
                    for (size_t i = 0; i < launches; ++i) {
                      ops::launch(config, d, copies[i % copies.size()], timer.stream());
                    }
                  },
                  launches, min_seconds);
            }
          }
#endif
        }
        throw UnsupportedError(str_cat("[ops] ", family_text, " cannot be run alone on ", device_text));
      },
      desc);
}

}  // namespace dyno
