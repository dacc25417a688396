#include "gguf/parse.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "gguf/byte_reader.h"
#include "gguf/text.h"

namespace dyno {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxNameBytes = 65535;
constexpr int kMaxArrayDepth = 16;
constexpr uint64_t kMaxDims = 4;

// Minimum sizes of an entry. Counts are checked against them before anything is reserved.
constexpr uint64_t kMinKeyValueBytes = 8 + 1 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;

// The name of a field in a message, built only when a message is needed.
struct Field {
  std::string_view what;
  std::string_view name;
};
std::ostream& operator<<(std::ostream& out, const Field& field) {
  return out << field.what << ' ' << in_quotes(field.name);
}

std::string_view read_name(ByteReader& in, std::string_view what) {
  const uint64_t start = in.position();
  const std::string_view name = in.read_string(what);
  if (name.empty()) in.fail(start, what, " is empty");
  if (name.size() > kMaxNameBytes) {
    in.fail(start, what, " ", in_quotes(name), " has ", name.size(), " bytes, more than ", kMaxNameBytes);
  }
  if (!is_utf8(name)) in.fail(start, what, " ", in_quotes(name), " is not valid UTF-8");
  if (name.find('\0') != std::string_view::npos)
    in.fail(start, what, " ", in_quotes(name), " contains a NUL character");
  return name;
}

MetaType read_type(ByteReader& in, const Field& field) {
  const uint64_t start = in.position();
  const auto id = in.read<uint32_t>(field);
  if (id > static_cast<uint32_t>(MetaType::float64)) {
    in.fail(start, field, " has value type ", id, ", which the format does not have");
  }
  return static_cast<MetaType>(id);
}

void check_bools(const ByteReader& in, uint64_t start, const std::byte* data, uint64_t count, const Field& field) {
  for (uint64_t i = 0; i < count; ++i) {
    if (const auto value = std::to_integer<unsigned>(data[i]); value > 1) {
      in.fail(start + i, field, " is a bool of value ", value, "; expected 0 or 1");
    }
  }
}

void skip_value(ByteReader& in, MetaType type, const Field& field, int depth);

void skip_array(ByteReader& in, const Field& field, int depth) {
  const uint64_t start = in.position();
  if (depth > kMaxArrayDepth) in.fail(start, field, " nests arrays deeper than ", kMaxArrayDepth);
  const MetaType element = read_type(in, field);
  const auto count = in.read<uint64_t>(field);
  const size_t size = meta_type_size(element);
  // A string needs at least its length, an inner array its type and count.
  const uint64_t smallest = size != 0 ? size : element == MetaType::string ? 8 : 12;
  if (count > in.remaining() / smallest) {
    in.fail(start, field, " is an array of ", count, " ", meta_type_name(element), " values, which need at least ",
            smallest, " bytes each, but only ", in.left(), " are left");
  }
  if (size != 0) {
    const uint64_t first = in.position();
    const std::byte* data = in.take(count * size, field);
    if (element == MetaType::boolean) check_bools(in, first, data, count, field);
    return;
  }
  for (uint64_t i = 0; i < count; ++i) skip_value(in, element, field, depth + 1);
}

void skip_value(ByteReader& in, MetaType type, const Field& field, int depth) {
  const uint64_t start = in.position();
  if (type == MetaType::array) return skip_array(in, field, depth);
  if (type == MetaType::string) {
    in.read_string(field);
    return;
  }
  const std::byte* data = in.take(meta_type_size(type), field);
  if (type == MetaType::boolean) check_bools(in, start, data, 1, field);
}

void read_metadata(ByteReader& in, uint64_t count, Metadata& metadata) {
  // Limited, because a sparse file of many gigabytes may claim a count that passes the header check and is still
  // absurd.
  metadata.reserve(std::min<uint64_t>(count, 1024));
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t start = in.position();
    const std::string_view key = read_name(in, "metadata key");
    const Field field{"the value of key", key};
    const MetaType type = read_type(in, field);
    const uint64_t offset = in.position();
    const std::byte* data = in.here();
    skip_value(in, type, field, 1);
    if (!metadata.add({key, {type, data}, offset})) in.fail(start, "metadata key ", in_quotes(key), " appears twice");
  }
}

uint64_t read_alignment(const ByteReader& in, const Metadata& metadata) {
  const Metadata::Entry* entry = metadata.find("general.alignment");
  if (entry == nullptr) return kDefaultAlignment;
  if (entry->value.type != MetaType::uint32) {
    in.fail(entry->offset, "key 'general.alignment' has type ", meta_type_name(entry->value.type), "; expected uint32");
  }
  const auto alignment = load_unaligned<uint32_t>(entry->value.data);
  if (alignment < 8 || (alignment & (alignment - 1)) != 0) {
    in.fail(entry->offset, "key 'general.alignment' is ", alignment, "; expected a power of two, at least 8");
  }
  return alignment;
}

std::string_view unknown_type_reason(uint32_t id) {
  // q4_2 and q4_3; interleaved q4_0; interleaved iq4_nl.
  if (id == 4 || id == 5 || (id >= 31 && id <= 33) || id == 37 || id == 38) return "was removed from the format";
  if (id == 36) return "was removed from the format; forks that write it mean I2_S of BitNet, which is not supported";
  if (id >= 133 && id < 400) return "is a type of ik_llama.cpp that is not supported; requantise the tensor";
  return "the format does not have";
}

// Sets type and nbytes after checking the shape against the block of the type.
void check_layout(const ByteReader& in, uint64_t start, uint32_t type_id, TensorInfo& tensor) {
  const Field field{"tensor", tensor.name};
  const DTypeInfo* type = type_id < kFirstInternalType ? find_dtype(type_id) : nullptr;
  if (type == nullptr) in.fail(start, field, " has type ", type_id, ", which ", unknown_type_reason(type_id));
  tensor.type = type->type;
  uint64_t elements = 1;
  for (const int64_t dim : tensor.dims) {
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(dim), &elements) ||
        elements > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      in.fail(start, field, " of shape ", describe_shape(tensor), " has more than 2^63 - 1 elements");
    }
  }
  if (tensor.dims[0] % type->block_elements != 0) {
    in.fail(start, field, " of type ", type->name, " has rows of ", tensor.dims[0],
            " elements, which is not a multiple of its block of ", type->block_elements);
  }
  const uint64_t rows = elements / static_cast<uint64_t>(tensor.dims[0]);
  if (static_cast<uint64_t>(tensor.dims[1]) % type->rows != 0) {
    in.fail(start, field, " of type ", type->name, " has ", tensor.dims[1], " rows, which is not a multiple of the ",
            type->rows, " that the type interleaves");
  }
  size_t meta = 0;
  if (__builtin_mul_overflow(elements / type->block_elements, type->block_bytes, &tensor.nbytes) ||
      __builtin_mul_overflow(rows, type->row_meta_bytes, &meta) ||
      __builtin_add_overflow(tensor.nbytes, meta, &tensor.nbytes)) {
    in.fail(start, field, " of shape ", describe_shape(tensor), " and type ", type->name, " has more than 2^64 bytes");
  }
}

TensorInfo read_tensor(ByteReader& in, uint64_t alignment) {
  TensorInfo tensor;
  tensor.name = read_name(in, "tensor name");
  const Field field{"tensor", tensor.name};
  const uint64_t dims_at = in.position();
  const auto n_dims = in.read<uint32_t>(field);
  if (n_dims == 0 || n_dims > kMaxDims) {
    in.fail(dims_at, field, " has ", n_dims, " dimensions; expected 1 to ", kMaxDims);
  }
  tensor.n_dims = static_cast<int>(n_dims);
  for (uint32_t i = 0; i < n_dims; ++i) {
    const uint64_t at = in.position();
    const auto dim = in.read<uint64_t>(field);
    if (dim == 0 || dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      in.fail(at, field, ": dimension ", i, " is ", dim, "; expected 1 to 2^63 - 1");
    }
    tensor.dims[i] = static_cast<int64_t>(dim);
  }
  const uint64_t type_at = in.position();
  check_layout(in, type_at, in.read<uint32_t>(field), tensor);
  const uint64_t offset_at = in.position();
  tensor.offset = in.read<uint64_t>(field);
  if (tensor.offset % alignment != 0) {
    in.fail(offset_at, field, ": offset ", tensor.offset, " is not a multiple of the alignment ", alignment);
  }
  return tensor;
}

// The end of the message about a file of another format: the format and the way to a GGUF file, if it is known.
std::string_view other_format(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), std::min<size_t>(bytes.size(), 64));
  if (text.starts_with("version https://git-lfs")) {
    return "; it is a pointer of Git LFS. In the folder of the file, run git lfs pull";
  }
  if (text.starts_with("<!") || text.starts_with("<htm")) {
    return "; it is a web page. Download the file that the page offers";
  }
  if (text.starts_with("PK\x03\x04") || text.substr(std::min<size_t>(text.size(), 8)).starts_with("{\"")) {
    return "; it looks like a file of PyTorch or safetensors. Convert the model with llama.cpp's convert_hf_to_gguf.py";
  }
  return "";
}

// Turns offsets in the data section into offsets in the file and pointers.
void place_tensors(const ByteReader& in, std::span<const std::byte> bytes, ParsedFile& parsed) {
  if (parsed.tensors.empty()) return;
  if (parsed.data_offset > bytes.size()) {
    in.fail(in.position(), "the tensor data starts at byte ", parsed.data_offset, ", past the end of the file");
  }
  const uint64_t available = bytes.size() - parsed.data_offset;
  for (TensorInfo& tensor : parsed.tensors) {
    if (tensor.offset > available || tensor.nbytes > available - tensor.offset) {
      in.fail(parsed.data_offset, Field{"tensor", tensor.name}, " needs ", tensor.nbytes, " bytes at offset ",
              tensor.offset, " of the tensor data, but the file has only ", available, " bytes of it", kIncomplete);
    }
    tensor.offset += parsed.data_offset;
    tensor.data = bytes.data() + tensor.offset;
  }
  std::vector<size_t> order(parsed.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return parsed.tensors[a].offset < parsed.tensors[b].offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const TensorInfo& before = parsed.tensors[order[i - 1]];
    const TensorInfo& after = parsed.tensors[order[i]];
    if (before.offset + before.nbytes > after.offset) {
      in.fail(after.offset, "the data of tensor ", in_quotes(after.name), " overlaps that of tensor ",
              in_quotes(before.name), ", which has ", before.nbytes, " bytes at byte ", before.offset);
    }
  }
}

}  // namespace

std::string describe_shape(const TensorInfo& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.n_dims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(tensor.dims[i]);
  return text + "]";
}

ParsedFile parse_file(std::span<const std::byte> bytes, const std::string& path, uint32_t file,
                      std::span<const std::byte> data) {
  ByteReader in(bytes, path, data.size());
  ParsedFile parsed;
  parsed.metadata = Metadata(path);
  if (const auto magic = in.read<uint32_t>("the magic number"); magic != kMagic) {
    in.fail(0, "this is not a GGUF file: it starts with ",
            in_quotes({reinterpret_cast<const char*>(bytes.data()), sizeof(magic)}), " instead of 'GGUF'",
            other_format(bytes));
  }
  parsed.version = in.read<uint32_t>("the version");
  if ((parsed.version & 0xffff) == 0 && parsed.version != 0) {
    in.fail(4, "this is a big-endian (byte-swapped) GGUF file of version ", parsed.version >> 24,
            ", which is not supported; convert it to little-endian");
  }
  if (parsed.version != 2 && parsed.version != 3) {
    in.fail(4, "GGUF version ", parsed.version, " is not supported; expected 2 or 3");
  }
  const auto tensor_count = in.read<uint64_t>("the tensor count");
  const auto key_count = in.read<uint64_t>("the metadata count");
  if (tensor_count > in.remaining() / kMinTensorBytes) {
    in.fail(8, "the tensor count ", tensor_count, " is too large for the ", in.left(), " that are left", in.advice());
  }
  if (key_count > in.remaining() / kMinKeyValueBytes) {
    in.fail(16, "the metadata count ", key_count, " is too large for the ", in.left(), " that are left", in.advice());
  }
  read_metadata(in, key_count, parsed.metadata);
  parsed.alignment = read_alignment(in, parsed.metadata);

  std::unordered_set<std::string_view> names;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    const uint64_t start = in.position();
    TensorInfo tensor = read_tensor(in, parsed.alignment);
    tensor.file = file;
    if (!names.insert(tensor.name).second) in.fail(start, "tensor ", in_quotes(tensor.name), " appears twice");
    parsed.tensors.push_back(tensor);
  }
  parsed.header_bytes = in.position();
  parsed.data_offset = (in.position() + parsed.alignment - 1) / parsed.alignment * parsed.alignment;
  place_tensors(in, data, parsed);
  return parsed;
}

}  // namespace dyno
