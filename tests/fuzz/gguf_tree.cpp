#include "gguf_tree.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "core/dtype.h"

namespace dyno::fuzz {
namespace {

constexpr uint32_t kString = 8, kArray = 9;
constexpr uint64_t kMaxTensor = 1 << 18;
constexpr size_t kDefaultAlignment = 32;

size_t size_of(uint32_t type) {
  constexpr std::array<size_t, 13> sizes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return type < sizes.size() ? sizes[type] : 0;
}

// Reads until something does not fit; then `ok` is false and everything reads as zero.
struct Cursor {
  std::span<const uint8_t> bytes;
  size_t at = 0;
  bool ok = true;

  std::span<const uint8_t> take(uint64_t n) {
    if (!ok || n > bytes.size() - at) {
      ok = false;
      return {};
    }
    at += n;
    return bytes.subspan(at - n, n);
  }
  template <typename T>
  T number() {
    T value{};
    if (const auto raw = take(sizeof(T)); ok) std::memcpy(&value, raw.data(), sizeof(T));
    return value;
  }
  std::string text() {
    const auto raw = take(number<uint64_t>());
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  void skip_value(uint32_t type, int depth = 0) {
    if (type == kString) {
      take(number<uint64_t>());
    } else if (type == kArray && depth < 4) {
      const auto element = number<uint32_t>();
      const auto count = number<uint64_t>();
      if (const size_t size = size_of(element); size > 0) {
        take(count > bytes.size() ? ~uint64_t{0} : count * size);
      } else {
        for (uint64_t i = 0; i < count && ok; ++i) skip_value(element, depth + 1);
      }
    } else if (const size_t size = size_of(type); size > 0) {
      take(size);
    } else {
      ok = false;
    }
  }
};

template <typename T>
void put(Bytes& out, T value) {
  const auto* raw = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), raw, raw + sizeof(T));
}

void put_text(Bytes& out, const std::string& text) {
  put<uint64_t>(out, text.size());
  out.insert(out.end(), text.begin(), text.end());
}

void pad(Bytes& out, size_t alignment) { out.resize((out.size() + alignment - 1) / alignment * alignment); }

size_t alignment_of(const GgufTree& tree) {
  for (const MetaEntry& entry : tree.metadata) {
    if (entry.key != "general.alignment" || entry.value.size() != 4) continue;
    uint32_t value = 0;
    std::memcpy(&value, entry.value.data(), 4);
    if (value > 0 && value <= 4096) return value;
  }
  return kDefaultAlignment;
}

std::string architecture_of(const GgufTree& tree) {
  for (const MetaEntry& entry : tree.metadata) {
    if (entry.key == "general.architecture" && entry.value.size() > 8) {
      return {entry.value.begin() + 8, entry.value.end()};
    }
  }
  return {};
}

// Bytes that a tensor of these dimensions takes; nothing where there are none, or too many.
std::optional<uint64_t> bytes_of(const TensorEntry& tensor) {
  const DTypeInfo* info = find_dtype(tensor.type);
  if (info == nullptr || tensor.dims.empty()) return std::nullopt;
  uint64_t elements = 1;
  for (const uint64_t d : tensor.dims) {
    if (d == 0 || d > kMaxTensor || elements > kMaxTensor) return std::nullopt;
    elements *= d;
  }
  if (elements > kMaxTensor || tensor.dims[0] % info->block_elements != 0) return std::nullopt;
  const uint64_t rows = elements / tensor.dims[0];
  return elements / info->block_elements * info->block_bytes + rows * info->row_meta_bytes;
}

// As many bytes as the dimensions ask for, by repeating what was there.
void fit_data(TensorEntry& tensor) {
  const auto wanted = bytes_of(tensor);
  if (!wanted || tensor.data.empty()) return;
  const size_t had = tensor.data.size();
  tensor.data.resize(*wanted);
  for (size_t i = had; i < tensor.data.size(); ++i) tensor.data[i] = tensor.data[i - had];
}

uint64_t odd_number(Random& random, uint64_t now) {
  static constexpr std::array<uint64_t, 20> kNumbers = {
      0,          1,          2,          3,       4,          7,          8,          16,         32,         64,
      0x7fffffff, 0x80000000, 0xffffffff, 1 << 16, 1ull << 32, 1ull << 31, 1ull << 62, 1ull << 63, ~0ull - 31, ~0ull};
  switch (below(random, 8)) {
    case 0:
      return now + 1;
    case 1:
      return now - 1;
    case 2:
      return now * 2;
    case 3:
      return now / 2;
    case 4:
    case 5:
      return below(random, 24);
    default:
      return kNumbers[below(random, kNumbers.size())];
  }
}

double odd_float(Random& random, double now) {
  static constexpr std::array kNumbers = {0.0, -0.0, 1.0, -1.0, 1e-6, 1e-38, 1e-45, 3e38, 1e30, 1e300, -1e30, 0.5, 8.0};
  switch (below(random, 6)) {
    case 0:
      return now * 2;
    case 1:
      return -now;
    case 2:
      return std::bit_cast<double>(below(random, 2) == 0 ? 0x7ff0000000000000 : 0x7ff8000000000000);
    default:
      return kNumbers[below(random, kNumbers.size())];
  }
}

void change_number(uint8_t* at, uint32_t type, Random& random) {
  const size_t size = size_of(type);
  if (type == 6) {
    float value = 0;
    std::memcpy(&value, at, 4);
    value = static_cast<float>(odd_float(random, static_cast<double>(value)));
    std::memcpy(at, &value, 4);
  } else if (type == 12) {
    double value = 0;
    std::memcpy(&value, at, 8);
    value = odd_float(random, value);
    std::memcpy(at, &value, 8);
  } else if (type == 7) {
    *at ^= 1;
  } else {
    uint64_t value = 0;
    std::memcpy(&value, at, size);
    value = odd_number(random, value);
    std::memcpy(at, &value, size);
  }
}

void change_value(MetaEntry& entry, Random& random) {
  if (entry.type == kString || entry.value.empty()) {
    // Not the length, which would make all that follows unreadable.
    if (entry.value.size() > 8) entry.value[8 + below(random, entry.value.size() - 8)] ^= 1u << below(random, 8);
    return;
  }
  if (entry.type != kArray) {
    change_number(entry.value.data(), entry.type, random);
    return;
  }
  uint32_t element = 0;
  uint64_t count = 0;
  std::memcpy(&element, entry.value.data(), 4);
  std::memcpy(&count, entry.value.data() + 4, 8);
  const size_t size = size_of(element);
  if (size == 0 || count == 0) return;
  if (below(random, 4) > 0) {
    change_number(entry.value.data() + 12 + below(random, count) * size, element, random);
    return;
  }
  const uint64_t shorter = below(random, 2) == 0 ? count - 1 : below(random, count + 1);
  std::memcpy(entry.value.data() + 4, &shorter, 8);
  entry.value.resize(12 + shorter * size);
}

// A scalar of this type instead, of about the same value.
void change_type(MetaEntry& entry, Random& random) {
  static constexpr std::array<uint32_t, 11> kScalars = {0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12};
  if (size_of(entry.type) == 0 || entry.type == 6 || entry.type == 12) return;
  entry.type = kScalars[below(random, kScalars.size())];
  entry.value.resize(size_of(entry.type));
  if (entry.type == 7) entry.value[0] &= 1;
}

void change_shape(TensorEntry& tensor, Random& random) {
  if (tensor.dims.empty()) return;
  uint64_t& dim = tensor.dims[below(random, tensor.dims.size())];
  switch (below(random, 6)) {
    case 0:
      std::swap(dim, tensor.dims[below(random, tensor.dims.size())]);
      break;
    case 1:
      dim += 1;
      break;
    case 2:
      dim = std::max<uint64_t>(dim - 1, 1);
      break;
    case 3:
      dim = std::max<uint64_t>(dim / 2, 1);
      break;
    case 4:
      dim *= 2;
      break;
    default:
      if (tensor.dims.size() < 4) tensor.dims.push_back(1 + below(random, 3));
  }
  fit_data(tensor);
}

void change_data(TensorEntry& tensor, Random& random) {
  if (tensor.data.empty()) return;
  static constexpr std::array<uint32_t, 8> kPatterns = {0,          0xffffffff, 0x7f800000, 0x7fc00000,
                                                        0x7c007c00, 0x80000000, 0x00000001, 0xff7fffff};
  const size_t at = below(random, tensor.data.size());
  const size_t count = std::min(tensor.data.size() - at, size_t{4} << below(random, 6));
  const uint32_t pattern = below(random, 3) == 0 ? static_cast<uint32_t>(random()) : kPatterns[below(random, 8)];
  for (size_t i = 0; i < count; ++i) tensor.data[at + i] = static_cast<uint8_t>(pattern >> (i % 4 * 8));
}

template <typename Entries>
auto* pick(Entries& entries, Random& random) {
  return entries.empty() ? nullptr : &entries[below(random, entries.size())];
}

// Those that are not the vocabulary: hyper-parameters are what decides.
MetaEntry* pick_short(GgufTree& tree, Random& random) {
  for (int attempt = 0; attempt < 8; ++attempt) {
    MetaEntry* entry = pick(tree.metadata, random);
    if (entry == nullptr || entry->value.size() <= 256) return entry;
  }
  return nullptr;
}

}  // namespace

std::optional<GgufTree> parse_tree(std::span<const uint8_t> bytes) {
  Cursor in{bytes};
  const auto magic = in.number<uint32_t>();
  GgufTree tree;
  tree.version = in.number<uint32_t>();
  const auto n_tensors = in.number<uint64_t>();
  const auto n_entries = in.number<uint64_t>();
  if (!in.ok || magic != 0x46554747 || n_tensors > 4096 || n_entries > 4096) return std::nullopt;
  for (uint64_t i = 0; i < n_entries && in.ok; ++i) {
    MetaEntry entry{.key = in.text(), .type = in.number<uint32_t>(), .value = {}};
    const size_t begin = in.at;
    in.skip_value(entry.type);
    if (in.ok) entry.value.assign(bytes.begin() + begin, bytes.begin() + in.at);
    tree.metadata.push_back(std::move(entry));
  }
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < n_tensors && in.ok; ++i) {
    TensorEntry tensor;
    tensor.name = in.text();
    const auto n_dims = in.number<uint32_t>();
    for (uint32_t d = 0; d < n_dims && d < 8 && in.ok; ++d) tensor.dims.push_back(in.number<uint64_t>());
    tensor.type = in.number<uint32_t>();
    offsets.push_back(in.number<uint64_t>());
    in.ok &= n_dims <= 8;
    tree.tensors.push_back(std::move(tensor));
  }
  if (!in.ok) return std::nullopt;
  const size_t alignment = alignment_of(tree);
  const size_t data = (in.at + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const auto wanted = bytes_of(tree.tensors[i]);
    if (!wanted || offsets[i] > bytes.size() || data + offsets[i] + *wanted > bytes.size()) continue;
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(data + offsets[i]);
    tree.tensors[i].data.assign(begin, begin + static_cast<std::ptrdiff_t>(*wanted));
  }
  return tree;
}

Bytes write_tree(const GgufTree& tree) {
  Bytes out = {'G', 'G', 'U', 'F'};
  put<uint32_t>(out, tree.version);
  put<uint64_t>(out, tree.tensors.size());
  put<uint64_t>(out, tree.metadata.size());
  for (const MetaEntry& entry : tree.metadata) {
    put_text(out, entry.key);
    put<uint32_t>(out, entry.type);
    out.insert(out.end(), entry.value.begin(), entry.value.end());
  }
  const size_t alignment = alignment_of(tree);
  uint64_t offset = 0;
  for (const TensorEntry& tensor : tree.tensors) {
    put_text(out, tensor.name);
    put<uint32_t>(out, static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t d : tensor.dims) put<uint64_t>(out, d);
    put<uint32_t>(out, tensor.type);
    put<uint64_t>(out, offset);
    offset += (tensor.data.size() + alignment - 1) / alignment * alignment;
  }
  for (const TensorEntry& tensor : tree.tensors) {
    pad(out, alignment);
    out.insert(out.end(), tensor.data.begin(), tensor.data.end());
  }
  return out;
}

void mutate_tree(GgufTree& tree, const GgufTree& other, Random& random) {
  static constexpr std::array kTypes = {
#define DYNO_FLOAT_TYPE(name, id, ...) id,
#define DYNO_DATA_TYPE(name, id, ...) id,
#define DYNO_QUANT_TYPE(name, id, ...) id,
#define DYNO_CODED_TYPE(name, id, ...) id,
#define DYNO_VALUES_TYPE(name, id, ...) id,
#define DYNO_INTERLEAVED_TYPE(name, id, ...) id,
#include "core/weight_types.def"
  };
  MetaEntry* const entry = pick_short(tree, random);
  TensorEntry* const tensor = pick(tree.tensors, random);
  switch (below(random, 14)) {
    case 0:
    case 1:
    case 2:
    case 3:
      if (entry != nullptr) change_value(*entry, random);
      break;
    case 4:
      if (entry != nullptr) change_type(*entry, random);
      break;
    case 5:
      if (entry != nullptr) tree.metadata.erase(tree.metadata.begin() + (entry - tree.metadata.data()));
      break;
    case 6:  // what another model says, under this one's architecture
      if (!other.metadata.empty()) {
        MetaEntry taken = other.metadata[below(random, other.metadata.size())];
        const std::string theirs = architecture_of(other) + ".";
        if (taken.key.starts_with(theirs)) taken.key.replace(0, theirs.size(), architecture_of(tree) + ".");
        const auto same = std::find_if(tree.metadata.begin(), tree.metadata.end(),
                                       [&](const MetaEntry& known) { return known.key == taken.key; });
        if (same == tree.metadata.end()) {
          tree.metadata.push_back(std::move(taken));
        } else {
          *same = std::move(taken);
        }
      }
      break;
    case 7:
      if (tensor != nullptr) {
        tensor->type = static_cast<uint32_t>(kTypes[below(random, kTypes.size())]);
        fit_data(*tensor);
      }
      break;
    case 8:
    case 9:
      if (tensor != nullptr) change_shape(*tensor, random);
      break;
    case 10:
      if (tensor != nullptr) tree.tensors.erase(tree.tensors.begin() + (tensor - tree.tensors.data()));
      break;
    case 11:
      if (!other.tensors.empty()) {
        TensorEntry taken = other.tensors[below(random, other.tensors.size())];
        const auto same = std::find_if(tree.tensors.begin(), tree.tensors.end(),
                                       [&](const TensorEntry& known) { return known.name == taken.name; });
        if (same == tree.tensors.end()) {
          tree.tensors.push_back(std::move(taken));
        } else {
          *same = std::move(taken);
        }
      }
      break;
    default:
      if (tensor != nullptr) change_data(*tensor, random);
  }
}

SessionInput parse_input(std::span<const uint8_t> bytes) {
  SessionInput input;
  const auto settings = bytes.first(std::min(bytes.size(), SessionInput::kSettings));
  std::copy(settings.begin(), settings.end(), input.settings.begin());
  input.files = parse_files(bytes.subspan(settings.size()));
  return input;
}

Bytes write_input(const SessionInput& input) {
  Bytes out(input.settings.begin(), input.settings.end());
  put_files(out, input.files);
  return out;
}

void mutate_input(SessionInput& input, const SessionInput& other, Random& random) {
  const size_t kind = below(random, 16);
  if (kind < 5) {
    input.settings[below(random, SessionInput::kSettings)] = static_cast<uint8_t>(random());
    return;
  }
  Bytes& file = input.files[below(random, input.files.size())];
  if (kind < 15) {
    if (auto tree = parse_tree(file)) {
      const Bytes& source = other.files[below(random, other.files.size())];
      mutate_tree(*tree, parse_tree(source).value_or(GgufTree{}), random);
      file = write_tree(*tree);
      return;
    }
  }
  if (file.empty()) return;
  if (below(random, 4) == 0) {
    file.resize(below(random, file.size()));
  } else {
    // The header is where bytes decide; tensors have changes of their own.
    const size_t most = below(random, 2) == 0 ? file.size() : std::min<size_t>(file.size(), 8192);
    file[below(random, most)] = static_cast<uint8_t>(random());
  }
}

}  // namespace dyno::fuzz
