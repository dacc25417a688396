#include "core/device_loss.h"

#include <atomic>
#include <map>
#include <mutex>

#include "core/error.h"

namespace dyno {
namespace {

struct Losses {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::map<int, std::string> messages;
};

Losses& losses() {
  static auto& all = *new Losses;  // never destroyed, because destructors at exit still read it
  return all;
}

}  // namespace

void mark_device_lost(int ordinal, const std::string& reason) {
  Losses& all = losses();
  const std::lock_guard lock(all.mutex);
  all.messages.try_emplace(ordinal,
                           str_cat("[cuda] cuda:", ordinal, " is lost to this process (restart it to use this ",
                                   "GPU again; device='cpu' still works): ", reason));
  all.any.store(true, std::memory_order_release);
}

bool any_device_lost() noexcept { return losses().any.load(std::memory_order_acquire); }

std::string device_loss(int ordinal) {
  if (!any_device_lost()) return "";
  Losses& all = losses();
  const std::lock_guard lock(all.mutex);
  const auto found = all.messages.find(ordinal);
  return found == all.messages.end() ? "" : found->second;
}

void check_not_lost(int ordinal) {
  if (!any_device_lost()) [[likely]] {
    return;
  }
  const std::string message = device_loss(ordinal);
  if (!message.empty()) throw DeviceLostError(message);
}

}  // namespace dyno
