// The Python module dyno._core. Each stage of the engine has a bind_<stage>.cpp; this file calls them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/device_array.h"
#include "bindings/errors.h"
#include "build_info.h"

namespace nb = nanobind;

namespace dyno {
void bind_gguf(nb::module_& m);
void bind_info(nb::module_& m);
void bind_model(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_session(nb::module_& m);
}  // namespace dyno

NB_MODULE(_core, m) {
  m.doc() = "The dyno engine: GGUF files, plans, ops and sessions. Use it through the package dyno.";
  m.attr("__version__") = DYNO_VERSION;
  // Objects remain if a program ends while a daemon thread uses them. Its user cannot change that.
  nb::set_leak_warnings(false);
  dyno::register_errors(m);
  dyno::bind_info(m);
  dyno::bind_gguf(m);
  dyno::bind_model(m);
  dyno::bind_ops(m);
  dyno::bind_sampler(m);
  dyno::bind_device_array(m);
  dyno::bind_session(m);
}
