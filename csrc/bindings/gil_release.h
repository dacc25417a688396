// A part of a call that runs without the GIL.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace dyno {

// Releases the GIL until the end of a scope, as nanobind's own guard does, and also outlives the interpreter.
//
// If the interpreter ends while a daemon thread computes, the thread never gets the GIL again. CPython then ends the
// thread by pthread_exit(), which unwinds its stack. Such an unwinding must not leave a destructor, or the whole
// process is aborted. So the thread stays here until the process has ended.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace dyno
