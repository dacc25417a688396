#include "input_files.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <system_error>

namespace dyno::fuzz {

std::vector<Bytes> parse_files(std::span<const uint8_t> bytes) {
  const size_t count = bytes.empty() ? 1 : 1 + bytes[0] % kMaxShards;
  const size_t head = 1 + count * sizeof(uint32_t);
  std::vector<Bytes> files(count);
  if (bytes.size() < head) return files;
  auto rest = bytes.subspan(head);
  for (size_t i = 0; i < count; ++i) {
    uint32_t size = 0;
    std::memcpy(&size, &bytes[1 + i * sizeof size], sizeof size);
    const auto file = rest.first(i + 1 < count ? std::min<size_t>(size, rest.size()) : rest.size());
    files[i].assign(file.begin(), file.end());
    rest = rest.subspan(file.size());
  }
  return files;
}

void put_files(Bytes& out, const std::vector<Bytes>& files) {
  out.push_back(static_cast<uint8_t>(files.size() - 1));
  for (const Bytes& file : files) {
    const auto size = static_cast<uint32_t>(file.size());
    const auto* raw = reinterpret_cast<const uint8_t*>(&size);
    out.insert(out.end(), raw, raw + sizeof size);
  }
  for (const Bytes& file : files) out.insert(out.end(), file.begin(), file.end());
}

Folder::Folder() {
  const std::filesystem::path shared = "/dev/shm";
  const auto base = std::filesystem::is_directory(shared) ? shared : std::filesystem::temp_directory_path();
  std::string name = base / "dyno-fuzz-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    std::perror(name.c_str());
    std::exit(2);
  }
  path_ = name;
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string Folder::write(const std::vector<Bytes>& files) const {
  std::string first;
  for (size_t i = 0; i < files.size(); ++i) {
    char name[64] = "model.gguf";
    if (files.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.gguf", i + 1, files.size());
    const std::string path = path_ / name;
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(files[i].data()), static_cast<std::streamsize>(files[i].size()));
    if (!out.flush()) {
      std::perror(path.c_str());
      std::exit(2);
    }
    if (i == 0) first = path;
  }
  return first;
}

}  // namespace dyno::fuzz
