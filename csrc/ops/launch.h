// Launches an op of any family. Only this file knows which families have kernels on which device. It includes every
// family through a header that the build generates from families.def.
#pragma once

#include <string_view>

#include "core/error.h"
#include "ops/all_families.h"
#include "ops/args.h"
#include "ops/registry.h"

namespace dyno::ops {

namespace detail {
template <typename Desc>
struct ArgsOf;
#define DYNO_OP_FAMILY(name, Stem, ...) \
  template <>                           \
  struct ArgsOf<Stem##Desc> {           \
    using Type = Stem##Args;            \
  };
#include "ops/families.def"

enum class Launches : uint8_t { everywhere, on_cuda };
template <typename Desc>
inline constexpr Launches kFamilyLaunches{};
#define DYNO_OP_FAMILY(name, Stem, launches) \
  template <>                                \
  inline constexpr Launches kFamilyLaunches<Stem##Desc> = Launches::launches;
#include "ops/families.def"
}  // namespace detail

template <typename Desc>
using ArgsOf = typename detail::ArgsOf<Desc>::Type;

// Whether a family has kernels for the device of a context (CpuContext or CudaStream). families.def decides this, so a
// missing launch() is a compile error.
template <typename Desc, typename Context>
inline constexpr bool kLaunches =
    detail::kFamilyLaunches<Desc> == detail::Launches::everywhere || Context::kDevice == DeviceKind::cuda;

template <typename Desc, typename Args, typename Context>
concept HasLaunch = requires(const Config& config, const Desc& desc, const Args& args, Context& context) {
  launch(config, desc, args, context);
};

// Throws UnsupportedError for a family without kernels on that device.
template <typename Desc, typename Args, typename Context>
void launch_op(const Config& config, const Desc& desc, const Args& args, Context& context) {
  if constexpr (kLaunches<Desc, Context>) {
    launch(config, desc, args, context);
  } else {
    throw UnsupportedError(str_cat("[ops] no kernels for ", op_key(desc), " on this device"));
  }
}

}  // namespace dyno::ops
