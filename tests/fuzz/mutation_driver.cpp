// Stands in for libFuzzer where the compiler has none: mutates the files of a corpus at random and calls the target,
// under the compiler's sanitizers. A target with mutators of its own is given its inputs by them. No coverage feedback.
// Usage: TARGET CORPUS SECONDS SEED CRASH_FILE, or TARGET FILE for one input again.
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
extern "C" __attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                                                unsigned int seed);
extern "C" __attribute__((weak)) size_t LLVMFuzzerCustomCrossOver(const uint8_t* first, size_t first_size,
                                                                  const uint8_t* second, size_t second_size,
                                                                  uint8_t* out, size_t max_size, unsigned int seed);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxBytes = 1 << 16;
constexpr size_t kMaxOwnBytes = 1 << 20;  // of a target with mutators of its own

Bytes g_current;  // what the target is reading now, for the crash file
std::string g_crash_file;

void write_crash_file() {
  std::ofstream(g_crash_file, std::ios::binary)
      .write(reinterpret_cast<const char*>(g_current.data()), static_cast<std::streamsize>(g_current.size()));
  std::fprintf(stderr, "input written to %s\n", g_crash_file.c_str());
}

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::vector<Bytes> read_corpus(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) corpus.push_back(read_file(path));
  return corpus;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // By the target's own mutators, where it has them.
  void change(Bytes& bytes, const std::vector<Bytes>& corpus) {
    if (LLVMFuzzerCustomMutator == nullptr) {
      for (size_t n = 1 + below(4); n > 0; --n) mutate(bytes, corpus);
      return;
    }
    const auto seed = static_cast<unsigned int>(random_());
    Bytes out(kMaxOwnBytes);
    if (LLVMFuzzerCustomCrossOver != nullptr && below(2) == 0) {
      const Bytes& other = corpus[below(corpus.size())];
      out.resize(LLVMFuzzerCustomCrossOver(bytes.data(), bytes.size(), other.data(), other.size(), out.data(),
                                           out.size(), seed));
    } else {
      std::copy(bytes.begin(), bytes.end(), out.begin());
      out.resize(LLVMFuzzerCustomMutator(out.data(), bytes.size(), out.size(), seed));
    }
    bytes = std::move(out);
  }

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
  if (argc == 2) {
    const Bytes bytes = read_file(argv[1]);
    return LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s CORPUS SECONDS SEED CRASH_FILE, or %s FILE\n", argv[0], argv[0]);
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
    mutator.change(g_current, corpus);
    LLVMFuzzerTestOneInput(g_current.data(), g_current.size());
    ++runs;
  }
  std::printf("Done %llu runs on %zu files, seed %s\n", static_cast<unsigned long long>(runs), corpus.size(), argv[3]);
  return 0;
}
