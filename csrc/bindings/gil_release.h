// Parts of calls that run without the GIL, and references that they drop.
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

// Drops a reference to an object of Python, with or without the GIL. If the interpreter has ended, its objects go with
// the process. A thread that asks for the GIL too late stays here, as above.
inline void drop_reference(PyObject* object) noexcept {
  if (Py_IsInitialized() == 0) return;
  try {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(object);
    PyGILState_Release(state);
  } catch (const abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

}  // namespace dyno
