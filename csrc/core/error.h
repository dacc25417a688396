// Typed exceptions of the engine. Each maps 1:1 to a class of `dyno.errors` (bindings/errors.cpp).
// Messages start with the area in brackets and always carry the offending values.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace dyno {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The GGUF file is malformed. The message has the field, the value and the byte offset.
class GgufError : public Error {
 public:
  using Error::Error;
};
// The file is well-formed, but the engine cannot build a model from it: missing tensor, wrong shape, unknown
// architecture.
class ModelError : public Error {
 public:
  using Error::Error;
};
class ProfileError : public Error {
 public:
  using Error::Error;
};
// The request does not fit the memory budget, the context length or the batch.
class PlanError : public Error {
 public:
  using Error::Error;
};
// The session or engine was closed.
class ClosedError : public PlanError {
 public:
  using PlanError::PlanError;
};
// The request is legal, but no kernel or device here supports it.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};
class DeviceError : public Error {
 public:
  using Error::Error;
};
// The process cannot use the device any more after this error: core/device_loss.h.
class DeviceLostError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

// Concatenates its arguments with operator<<.
template <typename... Args>
std::string str_cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace dyno

// DYNO_CHECK(GgufError, cond, "[gguf] tensor ", name, ": offset ", offset, " past end ", size)
#define DYNO_CHECK(ErrorType, condition, ...)        \
  do {                                               \
    if (!(condition)) [[unlikely]] {                 \
      throw ErrorType(::dyno::str_cat(__VA_ARGS__)); \
    }                                                \
  } while (false)
