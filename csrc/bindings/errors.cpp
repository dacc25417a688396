#include "bindings/errors.h"

#include <cstring>
#include <exception>
#include <new>

#include "core/error.h"

namespace nb = nanobind;

namespace dyno {
namespace {

// Sets the Python error to dyno.errors.`name`. The module is imported at the first error, because importing it during
// the import of this module would be circular.
void raise(const char* name, const char* message) {
  nb::module_ errors = nb::module_::import_("dyno.errors");
  // Paths in messages may not be UTF-8.
  nb::object text = nb::steal(PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "replace"));
  PyErr_SetObject(nb::object(errors.attr(name)).ptr(), text.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const GgufError& e) {
    raise("GgufError", e.what());
  } catch (const ModelError& e) {
    raise("ModelError", e.what());
  } catch (const ProfileError& e) {
    raise("ProfileError", e.what());
  } catch (const ClosedError& e) {
    raise("ClosedError", e.what());
  } catch (const PlanError& e) {
    raise("PlanError", e.what());
  } catch (const UnsupportedError& e) {
    raise("UnsupportedError", e.what());
  } catch (const DeviceLostError& e) {
    raise("DeviceLostError", e.what());
  } catch (const DeviceError& e) {
    raise("DeviceError", e.what());
  } catch (const OutOfMemoryError& e) {
    raise("OutOfMemoryError", e.what());
  } catch (const std::bad_alloc&) {
    raise(
        "OutOfMemoryError",
        "[memory] this process gets no more memory of the host; lower ctx, sequences or ubatch, ask for fewer rows of "
        "logits, or end other programs");
  } catch (const Error& e) {
    raise("DynoError", e.what());
  }
}

}  // namespace

void register_errors(nb::module_&) { nb::register_exception_translator(translate, nullptr); }

}  // namespace dyno
