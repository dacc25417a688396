#include "gguf/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace dyno {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

FileMapping FileMapping::open(const std::string& path) {
  DYNO_CHECK(GgufError, path.find('\0') == std::string::npos, "[gguf] path contains a NUL character");
  // Without O_NONBLOCK, opening a named pipe would wait for a writer before fstat can turn it down.
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  DYNO_CHECK(GgufError, fd.get() >= 0, "[gguf] cannot open ", path, ": ", std::strerror(errno));
  struct stat status {};
  DYNO_CHECK(GgufError, ::fstat(fd.get(), &status) == 0, "[gguf] cannot stat ", path, ": ", std::strerror(errno));
  DYNO_CHECK(GgufError, S_ISREG(status.st_mode), "[gguf] ", path, " is not a regular file");
  DYNO_CHECK(GgufError, status.st_size > 0, "[gguf] ", path, ": the file is empty");
  const auto size = static_cast<size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  DYNO_CHECK(GgufError, address != MAP_FAILED, "[gguf] cannot map ", size, " bytes of ", path, ": ",
             std::strerror(errno));
  return {path, {static_cast<const std::byte*>(address), size}, true};
}

FileMapping FileMapping::borrow(std::span<const std::byte> bytes, std::string name) {
  return {std::move(name), bytes, false};
}

FileMapping::FileMapping(FileMapping&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      owned_(std::exchange(other.owned_, false)) {}

FileMapping& FileMapping::operator=(FileMapping&& other) noexcept {
  if (this != &other) {
    unmap();
    path_ = std::move(other.path_);
    bytes_ = std::exchange(other.bytes_, {});
    owned_ = std::exchange(other.owned_, false);
  }
  return *this;
}

FileMapping::~FileMapping() { unmap(); }

void FileMapping::unmap() noexcept {
  // The only failure of munmap is a range that is not page-aligned, which ours is by construction.
  if (owned_) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  owned_ = false;
}

bool FileMapping::contains(std::span<const std::byte> range) const {
  const auto begin = reinterpret_cast<uintptr_t>(bytes_.data());
  const auto first = reinterpret_cast<uintptr_t>(range.data());
  return first >= begin && first - begin <= bytes_.size() && range.size() <= bytes_.size() - (first - begin);
}

bool FileMapping::advise_drop(std::span<const std::byte> range) const {
  if (!owned_) return true;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = (first + page - 1) / page * page;
  const uintptr_t end = (first + range.size()) / page * page;
  return begin >= end || ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) == 0;
}

bool FileMapping::advise_willneed(std::span<const std::byte> range) const {
  if (!owned_ || range.empty()) return true;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = first / page * page;
  return ::madvise(reinterpret_cast<void*>(begin), first + range.size() - begin, MADV_WILLNEED) == 0;
}

}  // namespace dyno
