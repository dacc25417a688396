#include <cstdio>
#include <map>

#include "core/error.h"
#include "gguf/gguf_file.h"
#include "gguf/text.h"
#include "gguf/type_support.h"

namespace dyno {
namespace {

std::string human_bytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 6; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

std::string padded(std::string text, size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return text;
}

struct TypeTotal {
  size_t tensors = 0;
  uint64_t elements = 0;
  uint64_t bytes = 0;
};

}  // namespace

std::string GgufFile::describe() const {
  std::string text;
  for (const FileMapping& mapping : mappings_) {
    text += str_cat("file      ", mapping.path(), "  ", human_bytes(mapping.bytes().size()), "\n");
  }
  text += str_cat("version   ", version_, "\nalignment ", alignment_, "\n\nmetadata  ", metadata_.entries().size(),
                  " keys\n");
  for (const Metadata::Entry& entry : metadata_.entries()) {
    const std::string key = in_quotes(entry.key, 200);
    text += str_cat("  ", padded(key.substr(1, key.size() - 2), 44), " ",
                    padded(std::string(meta_type_name(entry.value.type)), 8), " ", describe_value(entry.value), "\n");
  }
  std::map<DType, TypeTotal> totals;
  for (const TensorInfo& tensor : tensors_) {
    TypeTotal& total = totals[tensor.type];
    total.tensors += 1;
    total.elements += static_cast<uint64_t>(tensor.n_elements());
    total.bytes += tensor.nbytes;
  }
  text += "\ntypes\n";
  for (const auto& [type, total] : totals) {
    const double bits = 8.0 * static_cast<double>(total.bytes) / static_cast<double>(total.elements);
    text += str_cat("  ", padded(std::string(dtype_name(type)), 10), " ", total.tensors, " tensors, ", total.elements,
                    " elements, ", human_bytes(total.bytes), ", ", short_number(bits),
                    " bits each: ", type_support(type), "\n");
  }
  text += str_cat("\ntensors   ", tensors_.size(), " (dimensions in file order, row length first)\n");
  for (const TensorInfo& tensor : tensors_) {
    const std::string name = in_quotes(tensor.name, 200);
    text += str_cat("  ", padded(name.substr(1, name.size() - 2), 44), " ",
                    padded(std::string(dtype_name(tensor.type)), 10), " ",
                    padded(short_number(bits_per_weight(tensor.type, tensor.dims[0])) + " bits", 12), " ",
                    padded(describe_shape(tensor), 24), " byte ", tensor.offset,
                    mappings_.size() > 1 ? str_cat(" of shard ", tensor.file + 1) : std::string(), "\n");
  }
  return text;
}

}  // namespace dyno
