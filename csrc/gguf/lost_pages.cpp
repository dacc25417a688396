#include "gguf/lost_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace dyno {
namespace {

// Lock-free, because the handler may read it at any point, and a forked child must not inherit a held lock.
std::atomic<LostPages::Watch*> g_watches{nullptr};
struct sigaction g_before {};
uintptr_t g_page = 4096;

// The watch whose range contains `address`.
LostPages::Watch* find_watch(uintptr_t address, uintptr_t& end) {
  for (LostPages::Watch* watch = g_watches.load(); watch != nullptr; watch = watch->next) {
    const uintptr_t begin = watch->begin.load();
    end = watch->end.load();
    // The entry may be freed and reused for another range between the two loads; `begin` then differs.
    if (begin != 0 && address >= begin && address < end && watch->begin.load() == begin) return watch;
  }
  return nullptr;
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if ((g_before.sa_flags & SA_SIGINFO) != 0) return g_before.sa_sigaction(signal, info, context);
  const bool fault = info->si_code > 0;
  if (g_before.sa_handler == SIG_IGN && !fault) return;
  if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) return g_before.sa_handler(signal);
  // The default action ends the process: a fault repeats after the return, and a signal that was sent is raised again.
  struct sigaction fallback {};
  fallback.sa_handler = SIG_DFL;
  sigaction(signal, &fallback, nullptr);
  if (!fault) raise(signal);
}

// Uses only system calls, and preserves errno.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  uintptr_t end = 0;
  LostPages::Watch* watch = info->si_code == BUS_ADRERR ? find_watch(address, end) : nullptr;
  bool mended = false;
  if (watch != nullptr) {
    // Maps zeros to the end of the range: a truncated part is missing completely, and one mapping does not reach the
    // limit on their number.
    const uintptr_t first = address / g_page * g_page;
    watch->lost.store(true);
    mended = ::mmap(reinterpret_cast<void*>(first), end - first, PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  if (!mended) pass_on(signal, info, context);
  errno = error;
}

bool install() {
  g_page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  // Read first, because a fault of another thread may occur as soon as the handler is installed.
  sigaction(SIGBUS, nullptr, &g_before);
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGBUS, &action, nullptr) == 0;
}

LostPages::Watch* take_watch() {
  for (LostPages::Watch* watch = g_watches.load(); watch != nullptr; watch = watch->next) {
    if (!watch->taken.exchange(true)) return watch;
  }
  auto* watch = new LostPages::Watch;
  watch->next = g_watches.load();
  while (!g_watches.compare_exchange_weak(watch->next, watch)) {
  }
  return watch;
}

}  // namespace

LostPages::LostPages(std::span<const std::byte> range) {
  [[maybe_unused]] static const bool installed = install();
  watch_ = take_watch();
  watch_->lost.store(false);
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  watch_->begin.store(begin);
  watch_->end.store((begin + range.size() + g_page - 1) / g_page * g_page);
}

LostPages::~LostPages() {
  watch_->end.store(0);
  watch_->begin.store(0);
  watch_->taken.store(false);
}

}  // namespace dyno
