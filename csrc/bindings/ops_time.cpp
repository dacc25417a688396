#include "bindings/ops_time.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bindings/cuda_launch.h"
#include "bindings/gil_release.h"
#include "bindings/launch_context.h"
#include "bindings/ops_convert.h"
#include "bindings/synthetic_args.h"
#include "ops/launch.h"

namespace nb = nanobind;

namespace dyno {
namespace {

constexpr size_t kMinLaunches = 5;
constexpr size_t kMaxLaunches = 200'000;

// More copies have no effect, because the caches are already cold.
constexpr int64_t kMaxCopies = 256;
constexpr int64_t kMaxChoices = 64;

#ifdef DYNO_HAVE_CUDA
// Launches in one graph, which share the start time of the graph.
constexpr size_t kLeastCaptured = 16;
#endif

// Calls launch_copy(i) for all copies in a cycle; see time_op().
template <typename Launch>
std::vector<double> measure(double min_seconds, size_t copies, const Launch& launch_copy) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  size_t at = 0;
  // Uses every copy once, and continues for a tenth of the time, so that clocks and branch predictors settle.
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

// The common inputs of all timed configurations of an op.
struct Request {
  ops::OpDesc desc;
  DeviceInfo device;
  int threads;
  double min_seconds;
  int64_t rotate_bytes;
  uint64_t seed;
  int64_t depth, sequences;
  double absent;
};

Request request_of(ops::Family family, const nb::dict& desc, int threads, double min_seconds, int64_t rotate_bytes,
                   uint64_t seed, int64_t depth, int64_t sequences, double absent, std::string_view isa,
                   std::string_view device_text) {
  const DeviceInfo device = device_from_name(device_text, isa);
  DYNO_CHECK(PlanError, min_seconds >= 0 && min_seconds <= 3600, "[time] min_seconds=", min_seconds,
             "; expected 0 to 3600");
  DYNO_CHECK(PlanError, rotate_bytes >= 0 && rotate_bytes <= device.memory_bytes / 2,
             "[time] rotate_bytes=", rotate_bytes, " is more than half of the memory, ", device.memory_bytes, " bytes");
  DYNO_CHECK(PlanError, depth >= 0 && depth < (int64_t{1} << 30), "[time] depth=", depth,
             " positions; expected 0 to 2^30");
  DYNO_CHECK(PlanError, sequences >= 1 && sequences <= 4096, "[time] sequences=", sequences, "; expected 1 to 4096");
  DYNO_CHECK(PlanError, absent >= 0 && absent <= 1, "[time] absent=", absent, "; expected a share, 0 to 1");
  DYNO_CHECK(PlanError, absent == 0 || family == ops::Family::matmul_id || family == ops::Family::moe_up_gate,
             "[time] absent is for matmul_id and moe_up_gate, not for ", ops::family_name(family));
  return {desc_from_dict(family, desc), device, threads, min_seconds, rotate_bytes, seed, depth, sequences, absent};
}

// As many sets of arguments as fill `rotate_bytes`. A launch reads only the experts that its ids name. With one choice
// of ids per set of weights, all sets together would read a small part of these bytes repeatedly from the caches. So
// each set of weights appears in several sets of arguments, with different ids.
template <typename D>
auto make_copies(SyntheticArgs& owner, const D& d, int64_t rotate_bytes, double absent) {
  std::vector<decltype(owner.make(d))> copies;
  int64_t weights = 0;
  do {
    copies.push_back(owner.make(d));
    ++weights;
    if constexpr (requires { copies.back().w_expert_stride_bytes, copies.back().ids, d.used; }) {
      const auto rows = std::max<int64_t>(1, std::llround(static_cast<double>(d.m * d.used) * (1 - absent)));
      const int64_t choices = rotate_bytes == 0 ? 1 : std::clamp<int64_t>(d.experts / rows, 1, kMaxChoices);
      for (int64_t i = 1; i < choices; ++i) {
        auto other = copies.back();
        owner.routing("ids", other.ids, d.m, d.used, d.experts);
        copies.push_back(other);
      }
    }
  } while (owner.total_bytes() < rotate_bytes && weights < kMaxCopies);
  return copies;
}

// Calls timed(i, samples) for every configuration, without the GIL; samples() measures the configuration.
template <typename Timed>
void time_configs(const Request& r, const std::vector<ops::Config>& configs, const Timed& timed) {
  std::visit(
      [&]<typename D>(const D& d) {
        using Args = decltype(std::declval<SyntheticArgs&>().make(d));
        if (r.device.kind == DeviceKind::cpu) {
          SyntheticArgs owner(r.seed, r.depth, r.sequences, r.absent);
          const std::vector<Args> copies = make_copies(owner, d, r.rotate_bytes, r.absent);
          for (size_t i = 0; i < configs.size(); ++i) {
            timed(i, [&] {
              LaunchContext launcher(ops::scratch_bytes(r.desc, configs[i]), r.threads, r.device.isa);
              return measure(r.min_seconds, copies.size(),
                             [&](size_t copy) { ops::launch_op(configs[i], d, copies[copy], launcher.context()); });
            });
          }
          return;
        }
#ifdef DYNO_HAVE_CUDA
        CudaTimer timer(r.device, r.desc, configs);
        SyntheticArgs owner(r.seed, r.depth, r.sequences, r.absent,
                            [&](const std::byte* host, size_t bytes) { return timer.upload(host, bytes); });
        const std::vector<Args> copies = make_copies(owner, d, r.rotate_bytes, r.absent);
        const size_t launches = std::max<size_t>(copies.size(), kLeastCaptured);
        for (size_t i = 0; i < configs.size(); ++i) {
          timed(i, [&] {
            return timer.time(
                [&] {
                  for (size_t n = 0; n < launches; ++n) {
                    ops::launch_op(configs[i], d, copies[n % copies.size()], timer.stream());
                  }
                },
                launches, r.min_seconds);
          });
        }
#else
        throw UnsupportedError(
            str_cat("[ops] ", ops::family_name(ops::family_of(r.desc)), " cannot be run alone on ", r.device.name));
#endif
      },
      r.desc);
}

}  // namespace

std::vector<double> time_op(std::string_view family_text, const nb::dict& desc, const std::optional<nb::dict>& config,
                            int threads, double min_seconds, int64_t rotate_bytes, uint64_t seed, int64_t depth,
                            int64_t sequences, double absent, std::string_view isa, std::string_view device) {
  const ops::Family family = ops::family_from_name(family_text);
  const Request request =
      request_of(family, desc, threads, min_seconds, rotate_bytes, seed, depth, sequences, absent, isa, device);
  const ops::Config chosen =
      config ? config_from_dict(family, *config) : ops::default_config(request.desc, request.device);
  const ops::Support support = ops::supports(request.desc, chosen, request.device);
  DYNO_CHECK(UnsupportedError, support.ok, "[", family_text, "] ", support.reason);
  const GilRelease unlocked;
  std::vector<double> found;
  time_configs(request, {chosen}, [&](size_t, const auto& samples) { found = samples(); });
  return found;
}

std::vector<std::vector<double>> time_op_configs(std::string_view family_text, const nb::dict& desc,
                                                 const std::vector<nb::dict>& configs, int threads, double min_seconds,
                                                 int64_t rotate_bytes, uint64_t seed, int64_t depth, int64_t sequences,
                                                 double absent, std::string_view isa, std::string_view device) {
  const ops::Family family = ops::family_from_name(family_text);
  const Request request =
      request_of(family, desc, threads, min_seconds, rotate_bytes, seed, depth, sequences, absent, isa, device);
  std::vector<ops::Config> chosen;
  std::vector<size_t> places;
  for (size_t i = 0; i < configs.size(); ++i) {
    const ops::Config config = config_from_dict(family, configs[i]);
    if (!ops::supports(request.desc, config, request.device).ok) continue;
    chosen.push_back(config);
    places.push_back(i);
  }
  const GilRelease unlocked;
  std::vector<std::vector<double>> found(configs.size());
  if (chosen.empty()) return found;
  time_configs(request, chosen, [&](size_t i, const auto& samples) {
    try {
      found[places[i]] = samples();
    } catch (const UnsupportedError&) {
      // The device refuses this launch, so it has no samples.
    }
  });
  return found;
}

}  // namespace dyno
