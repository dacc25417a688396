#include "bindings/launch_context.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace dyno {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr uint8_t kGuard = 0xA5;

int checked(int threads) {
  DYNO_CHECK(PlanError, threads >= 1 && threads <= 1024, "[threads] threads is ", threads, "; expected 1 to 1024");
  return threads;
}

}  // namespace

DeviceInfo device_with_isa(std::string_view name) {
  DeviceInfo device = detect_cpu();
  const CpuIsa best = device.isa;
  if (name == "auto") return device;
  const CpuIsa isa = cpu_isa_from_name(name);
  DYNO_CHECK(UnsupportedError, isa <= best, "[cpu] ", name, " kernels do not run here; the best is ",
             cpu_isa_name(best));
  bool compiled = false;
#ifdef DYNO_HAVE_ISA_portable
  compiled |= isa == CpuIsa::portable;
#endif
#ifdef DYNO_HAVE_ISA_avx2
  compiled |= isa == CpuIsa::avx2;
#endif
#ifdef DYNO_HAVE_ISA_avx512_vnni
  compiled |= isa == CpuIsa::avx512_vnni;
#endif
  DYNO_CHECK(UnsupportedError, compiled, "[cpu] this build has no ", name, " kernels");
  device.isa = isa;
  return device;
}

void LaunchContext::Free::operator()(std::byte* p) const { std::free(p); }

LaunchContext::LaunchContext(size_t scratch_bytes, int threads, CpuIsa isa) : pool_(checked(threads)) {
  const size_t per_thread = (scratch_bytes + 63) / 64 * 64;
  scratch_bytes_ = per_thread * static_cast<size_t>(threads);
  scratch_.reset(static_cast<std::byte*>(std::aligned_alloc(64, scratch_bytes_ + kGuardBytes)));
  DYNO_CHECK(OutOfMemoryError, scratch_ != nullptr, "[ops] cannot allocate ", scratch_bytes_,
             " bytes of scratch memory");
  std::memset(scratch_.get() + scratch_bytes_, kGuard, kGuardBytes);
  context_ = {&pool_, threads, isa, scratch_.get(), per_thread};
}

void LaunchContext::check_scratch() const {
  const std::byte* guard = scratch_.get() + scratch_bytes_;
  const auto* changed = std::find_if(guard, guard + kGuardBytes, [](std::byte b) { return b != std::byte{kGuard}; });
  DYNO_CHECK(Error, changed == guard + kGuardBytes, "[ops] a launch wrote at byte ", changed - scratch_.get(), " of ",
             scratch_bytes_, " bytes of scratch");
}

}  // namespace dyno
