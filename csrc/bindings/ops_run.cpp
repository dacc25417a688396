#include "bindings/ops_run.h"

#include <nanobind/stl/string.h>

#include "bindings/cuda_launch.h"
#include "bindings/gil_release.h"
#include "bindings/launch_context.h"
#include "bindings/op_args.h"
#include "bindings/ops_convert.h"
#include "ops/fields.h"
#include "ops/launch.h"
#include "ops/runs.h"

namespace nb = nanobind;

namespace dyno {
namespace {

using namespace ops;

std::vector<SequenceRun> read_runs(OpArgs& in, int64_t m) {
  const nb::object value = in.get("runs");
  if (!value.is_valid()) return {{0, static_cast<int32_t>(m), 0, 0}};
  std::vector<SequenceRun> runs;
  for (const nb::handle item : value) {
    const auto run = nb::cast<nb::tuple>(item);
    DYNO_CHECK(PlanError, run.size() == 4, "[ops] a run has ", run.size(),
               " values; expected 4: first_token, n_tokens, position, slot");
    runs.push_back(
        {nb::cast<int32_t>(run[0]), nb::cast<int32_t>(run[1]), nb::cast<int32_t>(run[2]), nb::cast<int32_t>(run[3])});
  }
  return runs;
}

// Number of cache positions that the runs use.
int64_t cells(const std::vector<SequenceRun>& runs, int64_t slot_positions) {
  int64_t most = 0;
  for (const SequenceRun& run : runs) {
    most = std::max(most, int64_t{run.slot} * slot_positions + run.position + run.n_tokens);
  }
  return most;
}

// Reads the arguments that a family's arguments() names.
class ReadArguments {
 public:
  explicit ReadArguments(OpArgs& in) : in_(in) {}

  template <typename T>
  void number(const char* name, T& value, std::type_identity_t<T> otherwise, std::type_identity_t<T> = {}) {
    value = in_.number<T>(name, otherwise);
  }
  template <typename T>
  void in(const char* name, const T*& data, int64_t count) {
    data = in_.in<T>(name, count);
  }
  template <typename T>
  void out(const char* name, T*& data, int64_t count) {
    data = in_.out<T>(name, count);
  }
  template <typename T>
  void optional(const char* name, const T*& data, int64_t count, bool) {
    data = in_.optional_in<T>(name, count);
  }
  template <typename T>
  void optional_out(const char* name, T*& data, int64_t count) {
    data = in_.optional_out<T>(name, count);
  }
  void constants(const char* name, const float*& data, int64_t count, float) { in(name, data, count); }
  void integers(const char* name, const int32_t*& data, int64_t count, int64_t) { in(name, data, count); }
  void routing(const char* name, const int32_t*& ids, int64_t m, int64_t used, int64_t) { in(name, ids, m * used); }
  void bytes(const char* name, const void*& data, int64_t count) { data = in_.in<uint8_t>(name, count); }
  template <typename T>
  void bytes_out(const char* name, T*& data, int64_t count) {
    data = reinterpret_cast<T*>(in_.out<uint8_t>(name, count));
  }
  void bytes_out(const char* name, void*& data, int64_t count) { data = in_.out<uint8_t>(name, count); }
  // float32 for f32, bytes for q8.
  void rows(const char* name, const void*& x, ActType act, int64_t count) {
    if (act == ActType::q8) return bytes(name, x, count);
    x = in_.in<float>(name, (count + 3) / 4);
  }
  template <typename Args>
  void runs(int64_t m, Args& args) {
    runs_ = read_runs(in_, m);
    args.runs = runs_.data();
    args.n_runs = static_cast<int32_t>(runs_.size());
    args.slot_positions = in_.number<int64_t>("slot_positions", m);
    cells_ = cells(runs_, args.slot_positions);
    if constexpr (requires { args.depth; }) {
      int64_t depth = 0;
      for (const SequenceRun& run : runs_) depth = std::max(depth, int64_t{run.position} + run.n_tokens);
      args.depth = in_.number<int64_t>("depth", depth);
      args.host_runs = runs_.data();
    }
  }
  // The state of each of these sequences.
  void state(const char* name, float*& data, int64_t elements) {
    int64_t slots = 0;
    for (const SequenceRun& run : runs_) slots = std::max(slots, int64_t{run.slot} + 1);
    out(name, data, slots * elements);
  }
  template <typename Byte>
  void cache(const char* name, Byte*& data, const char* row_name, int64_t& row, DType type, int64_t elements,
             int64_t offset = 0) {
    const auto least = static_cast<int64_t>(row_bytes(type, elements));
    row = in_.number<int64_t>(row_name, least);
    const int64_t count = extent(cells_, row, offset + least);
    if constexpr (std::is_const_v<Byte>) {
      data = reinterpret_cast<Byte*>(in_.in<uint8_t>(name, count));
    } else {
      data = reinterpret_cast<Byte*>(in_.out<uint8_t>(name, count));
    }
  }
  void latents(const char* name, const std::byte*& data, DType type, int64_t rows, int64_t row, int64_t elements) {
    const int64_t count = extent(rows, row, static_cast<int64_t>(row_bytes(type, elements)));
    data = reinterpret_cast<const std::byte*>(in_.in<uint8_t>(name, count));
  }
  void require(bool there, const char* name) const { in_.require(there, name); }

 private:
  OpArgs& in_;
  std::vector<SequenceRun> runs_;
  int64_t cells_ = 0;
};

}  // namespace

void run_op(std::string_view family_text, const nb::dict& desc_dict, const std::optional<nb::dict>& config_dict,
            const nb::dict& args_dict, int threads, std::string_view isa, std::string_view device_text,
            [[maybe_unused]] bool captured, int sm_count) {
  const Family family = family_from_name(family_text);
  const OpDesc desc = desc_from_dict(family, desc_dict);
  DeviceInfo device = device_from_name(device_text, isa);
  DYNO_CHECK(PlanError, sm_count >= 0 && (sm_count == 0 || device.kind == DeviceKind::cuda), "[ops] sm_count is ",
             sm_count, "; expected a number of multiprocessors of a GPU, or 0 for all");
  if (sm_count > 0) device.sm_count = sm_count;
  const Config config = config_dict ? config_from_dict(family, *config_dict) : default_config(desc, device);
  const Support support = supports(desc, config, device);
  DYNO_CHECK(UnsupportedError, support.ok, "[", family_text, "] ", support.reason);
  std::visit(
      [&]<typename D>(const D& d) {
        ArgsOf<D> args;
        if (device.kind == DeviceKind::cpu) {
          LaunchContext launcher(scratch_bytes(desc, config), threads, device.isa);
          OpArgs in(family_text, args_dict);
          ReadArguments reader(in);
          arguments(d, args, reader);
          in.finish();
          const GilRelease unlocked;
          launch_op(config, d, args, launcher.context());
          launcher.check_scratch();
          return;
        }
#ifdef DYNO_HAVE_CUDA
        CudaLaunch launcher(device, desc, config);
        OpArgs in(family_text, args_dict, &launcher);
        ReadArguments reader(in);
        arguments(d, args, reader);
        in.finish();
        if constexpr (requires { args.runs; }) {
          check_runs("ops", args.runs, args.n_runs, d.m, args.slot_positions);
          const size_t bytes = static_cast<size_t>(args.n_runs) * sizeof(SequenceRun);
          args.runs = static_cast<const SequenceRun*>(launcher.mirror(args.runs, bytes, false));
        }
        const GilRelease unlocked;
        launcher.begin(captured);
        launch_op(config, d, args, launcher.stream());
        launcher.end(captured);
        launcher.finish();
#else
        throw UnsupportedError(str_cat("[ops] ", family_text, " cannot be run alone on ", device_text));
#endif
      },
      desc);
}

}  // namespace dyno
