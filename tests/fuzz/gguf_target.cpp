// Fuzz target: one GGUF file in memory, or shards on disk if the input begins with "SM" (mapped) or "SC" (copied).
// Opens them, reads every value in every way, describes the file and dequantises its small tensors. Nothing but
// dyno::Error may come out; the sanitizers watch the rest.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "gguf/gguf_file.h"
#include "gguf/interleaved.h"
#include "gguf/split_name.h"
#include "gguf/text.h"
#include "input_files.h"

namespace {

using dyno::GgufFile;
using dyno::MetaArray;
using dyno::Metadata;
using dyno::MetaType;
using dyno::TensorInfo;

constexpr int64_t kMaxElements = 1 << 14;

// Reads every byte, so that AddressSanitizer sees any view that leaves the file.
uint64_t checksum(const void* data, size_t size) {
  uint64_t sum = 0;
  for (size_t i = 0; i < size; ++i) sum = sum * 31 + static_cast<const uint8_t*>(data)[i];
  return sum;
}

uint64_t read_array(const MetaArray& array) {
  uint64_t sum = array.count;
  if (array.element == MetaType::string) {
    for (const std::string_view text : array.strings()) sum += checksum(text.data(), text.size());
    sum += array.strings().to_vector().size();
  } else if (array.element == MetaType::array) {
    for (const MetaArray& inner : array.arrays()) sum += read_array(inner);
  } else {
    sum += checksum(array.data, array.count * dyno::meta_type_size(array.element));
  }
  return sum;
}

// Calls one getter; a wrong type is an expected error.
template <typename Getter>
void attempt(Getter getter) {
  try {
    getter();
  } catch (const dyno::Error&) {
  }
}

uint64_t read_metadata(const Metadata& metadata) {
  uint64_t sum = 0;
  for (const Metadata::Entry& entry : metadata.entries()) {
    const std::string_view key = entry.key;
    sum += dyno::describe_value(entry.value).size();
    if (entry.value.type == MetaType::array) sum += read_array(entry.value.as_array());
    attempt([&] { sum += metadata.get_u32(key); });
    attempt([&] { sum += static_cast<uint64_t>(metadata.get_i64(key)); });
    attempt([&] { sum += metadata.get_f32(key) > 0 ? 1 : 0; });
    attempt([&] { sum += metadata.get_bool(key) ? 1 : 0; });
    attempt([&] { sum += checksum(metadata.get_string(key).data(), metadata.get_string(key).size()); });
    attempt([&] { sum += metadata.get_string_array(key).size(); });
    attempt([&] { sum += metadata.get_i64_array(key).size(); });
    attempt([&] { sum += metadata.get_f32_array(key).size(); });
    attempt([&] { sum += metadata.get_bool_array(key).size(); });
    attempt([&] { sum += metadata.get_u32_per_layer(key, 3).size(); });
  }
  return sum;
}

uint64_t read_tensor(const GgufFile& file, const TensorInfo& tensor) {
  if (file.find_tensor(tensor.name) != &tensor) __builtin_trap();
  uint64_t sum = checksum(tensor.data, tensor.nbytes);
  const dyno::DTypeInfo& info = dyno::dtype_info(tensor.type);
  if (info.kind == dyno::TypeClass::interleaved && tensor.n_elements() <= kMaxElements) {
    const size_t unit = info.rows * dyno::row_bytes(info.plain, tensor.dims[0]);
    std::vector<std::byte> rows(unit);
    for (size_t at = 0; at < tensor.nbytes; at += unit) {
      dyno::take_apart(tensor.type, tensor.data + at, rows.data(), tensor.dims[0]);
      sum += checksum(rows.data(), rows.size());
    }
  }
  if (!dyno::can_dequantize(tensor.type) || tensor.n_elements() > kMaxElements) return sum;
  std::vector<float> values(static_cast<size_t>(tensor.n_elements()));
  dyno::dequantize_rows(tensor.type, tensor.data, values.data(), tensor.n_rows(), tensor.dims[0]);
  sum += checksum(values.data(), values.size() * sizeof(float));
  if (tensor.n_elements() % 32 == 0) {
    std::vector<uint16_t> blocks(values.size() / 32 * 17);
    dyno::quantize_row(dyno::DType::q8_0, values.data(), blocks.data(), tensor.n_elements());
    sum += checksum(blocks.data(), blocks.size() * 2);
  }
  return sum;
}

uint64_t read_file(const GgufFile& file) {
  uint64_t sum = read_metadata(file.metadata()) + file.describe().size();
  for (const TensorInfo& tensor : file.tensors()) sum += read_tensor(file, tensor);
  file.check_unchanged();
  return sum;
}

// A copy of exactly this size, aligned like a mapping.
uint64_t read_bytes(std::span<const uint8_t> data) {
  const auto bytes = std::make_unique<std::byte[]>(data.size());
  if (!data.empty()) std::memcpy(bytes.get(), data.data(), data.size());
  return read_file(GgufFile::from_memory({bytes.get(), data.size()}, "fuzz.gguf"));
}

uint64_t read_shards(std::span<const uint8_t> data, dyno::Reading reading) {
  static const dyno::fuzz::Folder folder;
  return read_file(GgufFile::open(folder.write(dyno::fuzz::parse_files(data)), reading));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint64_t sum = 0;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  sum += dyno::is_utf8(text) ? 1 : 0;
  if (const auto name = dyno::parse_split_name(std::string(text))) sum += name->path(name->number).size();
  try {
    if (text.starts_with("SM")) {
      sum += read_shards({data + 2, size - 2}, dyno::Reading::map);
    } else if (text.starts_with("SC")) {
      sum += read_shards({data + 2, size - 2}, dyno::Reading::copy);
    } else {
      sum += read_bytes({data, size});
    }
  } catch (const dyno::Error& error) {
    if (!dyno::is_utf8(error.what())) __builtin_trap();
  }
  // Keeps the reads alive under the optimiser.
  volatile uint64_t sink = sum;
  (void)sink;
  return 0;
}
