// The Python class of a session, shared by the sources of its bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/gil_release.h"
#include "core/error.h"
#include "runtime/session.h"

namespace dyno {

namespace nb = nanobind;

using IdArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sequences = std::vector<std::pair<int32_t, IdArray>>;
using Kernels = std::vector<std::tuple<std::string, std::string, nb::dict, std::string>>;
using RoutingArray = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// A session behind one lock, so that two threads cannot decode into the same cache, with a clear error after close(). A
// thread never waits for the lock while it holds the GIL, because the lock's owner may wait for the GIL. The lock is
// recursive, because Python's garbage collector may run a finalizer that uses the session during a report.
class PySession {
 public:
  // `file`: an open Gguf, or a path.
  PySession(const nb::object& file, const nb::dict& load, const nb::dict& context, const nb::dict& session,
            const Kernels& kernels, bool plan_only, const std::optional<nb::dict>& described,
            const nb::dict& placement);
  PySession(const PySession&) = delete;
  PySession& operator=(const PySession&) = delete;
  // A forked child does not have the threads that the destructor waits for, so it leaves the memory to the kernel.
  ~PySession() {
    if (forked()) new std::shared_ptr<runtime::Session>(std::move(session_));
  }

  void close() {
    if (forked()) return;
    std::shared_ptr<runtime::Session> last;
    const GilRelease release;
    {
      const std::lock_guard lock(mutex_);
      last.swap(session_);
    }
    last.reset();
  }

  nb::list time_ops(const Sequences& sequences, std::string_view rows, bool in_graph);
  nb::tuple decode(const Sequences& sequences, std::string_view rows, std::optional<RoutingArray> pinned, bool capture,
                   int64_t every) {
    return decode_into(sequences, rows, std::move(pinned), capture, every, /*on_device=*/false);
  }
  nb::tuple decode_to_device(const Sequences& sequences, std::string_view rows, std::optional<RoutingArray> pinned,
                             bool capture, int64_t every) {
    return decode_into(sequences, rows, std::move(pinned), capture, every, /*on_device=*/true);
  }

  // The caller must hold the lock.
  bool closed() const { return session_ == nullptr; }

  // Calls `use` with the lock and the GIL.
  template <typename Use>
  auto with(Use&& use) {
    check_process();
    std::unique_lock lock(mutex_, std::defer_lock);
    {
      const GilRelease release;
      lock.lock();
    }
    // A finalizer or a signal handler may close it during the call.
    const std::shared_ptr<runtime::Session> session = session_;
    DYNO_CHECK(ClosedError, session != nullptr, "[session] the session is closed");
    return use(*session);
  }

  // Calls `change` with the lock and without the GIL.
  template <typename Change>
  void change(Change&& change) {
    check_process();
    const GilRelease release;
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<runtime::Session> session = session_;  // as in with()
    DYNO_CHECK(ClosedError, session != nullptr, "[session] the session is closed");
    change(*session);
  }

 private:
  nb::tuple decode_into(const Sequences& sequences, std::string_view rows, std::optional<RoutingArray> pinned,
                        bool capture, int64_t every, bool on_device);
  bool forked() const { return getpid() != process_; }
  // Checked before the lock is taken: in a forked child, a thread that no longer exists may hold it.
  void check_process() const {
    DYNO_CHECK(DeviceError, !forked(), "[session] the session was opened in process ", process_, ", not in its child ",
               getpid(), "; open it again in this one");
  }

  std::shared_ptr<runtime::Session> session_;
  std::recursive_mutex mutex_;
  pid_t process_ = getpid();
};

// Lets signal handlers run, so that Ctrl-C ends a long decode. Checks only occasionally, because the GIL may not be
// free. Python runs handlers only in its main thread. A handler may also close the session, which ends the decode.
class SignalCheck {
 public:
  explicit SignalCheck(const PySession& session) : session_(&session) {}
  void operator()() {
    const auto now = std::chrono::steady_clock::now();
    if (!main_ || now - last_ < std::chrono::milliseconds(20)) return;
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    DYNO_CHECK(ClosedError, !session_->closed(),
               "[session] a signal handler closed the session during a call that computes");
    last_ = std::chrono::steady_clock::now();
  }

 private:
  const PySession* session_;
  bool main_ = gettid() == getpid();
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Binds the functions that sample tokens: Session.generation(), Session.decode_and_draw(), Generation.
void bind_drawing(nb::module_& m, nb::class_<PySession>& session);

}  // namespace dyno
