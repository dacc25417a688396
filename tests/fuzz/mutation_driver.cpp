// Stands in for libFuzzer where the compiler has none: mutates the files of a corpus at random and calls the target,
// under the compiler's sanitizers. No coverage feedback. Usage: gguf_fuzz CORPUS SECONDS SEED CRASH_FILE
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxBytes = 1 << 16;

Bytes g_current;  // what the target is reading now, for the crash file
std::string g_crash_file;

void write_crash_file() {
  std::ofstream(g_crash_file, std::ios::binary)
      .write(reinterpret_cast<const char*>(g_current.data()), static_cast<std::streamsize>(g_current.size()));
  std::fprintf(stderr, "input written to %s\n", g_crash_file.c_str());
}

std::vector<Bytes> read_corpus(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t n) { return n == 0 ? 0 : std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  void mutate(Bytes& bytes, const std::vector<Bytes>& corpus) {
    static constexpr uint64_t kNumbers[] = {
        0,          1,          2,       8,       9,          16,         32,         255,   9999,      0x7fffffff,
        0x80000000, 0xffffffff, 1 << 16, 1 << 20, 1ull << 32, 1ull << 62, 1ull << 63, ~0ull, ~0ull - 31};
    if (bytes.empty()) bytes.push_back(0);
    const size_t at = below(bytes.size());
    switch (below(8)) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(below(256));
        break;
      case 2:
      case 3: {
        const uint64_t number = kNumbers[below(std::size(kNumbers))];
        std::memcpy(&bytes[at], &number, std::min<size_t>(bytes.size() - at, below(2) == 0 ? 4 : 8));
        break;
      }
      case 4:
        bytes.resize(at);
        break;
      case 5: {  // repeat a piece, as if a count were too small
        const Bytes piece(
            bytes.begin() + static_cast<std::ptrdiff_t>(at),
            bytes.begin() + static_cast<std::ptrdiff_t>(at + below(std::min<size_t>(bytes.size() - at, 64))));
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), piece.begin(), piece.end());
        break;
      }
      case 6:
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    bytes.begin() + static_cast<std::ptrdiff_t>(at + below(std::min<size_t>(bytes.size() - at, 64))));
        break;
      default: {  // the tail of another file
        const Bytes& other = corpus[below(corpus.size())];
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(std::min(at, other.size())), other.end());
      }
    }
    if (bytes.size() > kMaxBytes) bytes.resize(kMaxBytes);
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s CORPUS SECONDS SEED CRASH_FILE\n", argv[0]);
    return 2;
  }
  const std::vector<Bytes> corpus = read_corpus(argv[1]);
  if (corpus.empty()) {
    std::fprintf(stderr, "no files in %s\n", argv[1]);
    return 2;
  }
  g_crash_file = argv[4];
  __sanitizer_set_death_callback(write_crash_file);
  std::set_terminate([] {
    write_crash_file();
    std::abort();
  });
  Mutator mutator(std::strtoull(argv[3], nullptr, 10));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::strtol(argv[2], nullptr, 10));
  uint64_t runs = 0;
  for (const Bytes& bytes : corpus) {
    g_current = bytes;
    LLVMFuzzerTestOneInput(g_current.data(), g_current.size());
    ++runs;
  }
  while (std::chrono::steady_clock::now() < end) {
    g_current = corpus[mutator.below(corpus.size())];
    const size_t mutations = 1 + mutator.below(4);
    for (size_t i = 0; i < mutations; ++i) mutator.mutate(g_current, corpus);
    LLVMFuzzerTestOneInput(g_current.data(), g_current.size());
    ++runs;
  }
  std::printf("Done %llu runs on %zu files, seed %s\n", static_cast<unsigned long long>(runs), corpus.size(), argv[3]);
  return 0;
}
