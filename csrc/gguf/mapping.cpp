#include "gguf/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/error.h"
#include "gguf/lost_pages.h"
#include "gguf/split_name.h"

namespace dyno {
namespace {

constexpr std::align_val_t kCopyAlignment{64};

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct stat status_of(const FileDescriptor& fd, const std::string& path) {
  struct stat status {};
  DYNO_CHECK(GgufError, ::fstat(fd.get(), &status) == 0, "[gguf] cannot stat ", path, ": ", std::strerror(errno));
  return status;
}

// Does not compare the inode, which is the one of the open file, or the status change time, which also changes if
// another file takes the name.
std::string difference(const struct stat& before, const struct stat& now) {
  if (before.st_size != now.st_size) return str_cat("it had ", before.st_size, " bytes and has ", now.st_size);
  if (before.st_mtim.tv_sec != now.st_mtim.tv_sec || before.st_mtim.tv_nsec != now.st_mtim.tv_nsec) {
    return "it was written to";
  }
  return "";
}

// The end of the message about a path that names no file.
std::string advice(const std::string& path) {
  if (errno != ENOENT) return "";
  const auto in_scheme = [](unsigned char c) { return std::isalnum(c) != 0 || c == '+' || c == '-' || c == '.'; };
  const size_t colon = path.find(":/");  // one slash, because paths of Python join two
  if (colon != std::string::npos && colon > 0 && std::all_of(path.begin(), path.begin() + colon, in_scheme)) {
    return "; dyno does not download models. Download the file, and give its path";
  }
  if (path.starts_with('~')) return "; your shell has not replaced the ~. Write the whole path";
  if (!path.ends_with(".gguf")) return "; dyno opens local GGUF files, and does not download models";
  if (const auto name = parse_split_name(path); name && name->count > 1) {
    return str_cat("; the model is split into ", name->count, " files, which must all be in one folder");
  }
  return "";
}

[[noreturn]] void fail_changed(const std::string& path, const std::string& how) {
  throw GgufError(
      str_cat("[gguf] ", path, ": the file changed while it was open: ", how,
              ". Open the model again. To replace the file of an open model, rename a new file to its name, "
              "or open the model with mmap=false"));
}

void read_whole(const FileDescriptor& fd, const std::string& path, std::byte* out, size_t size) {
  constexpr size_t kMost = size_t{1} << 30;  // per call, because a call reads at most 2 GiB
  for (size_t done = 0; done < size;) {
    const ssize_t count = ::pread(fd.get(), out + done, std::min(size - done, kMost), static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    DYNO_CHECK(GgufError, count >= 0, "[gguf] cannot read byte ", done, " of ", path, ": ", std::strerror(errno));
    if (count == 0) fail_changed(path, str_cat("it had ", size, " bytes and ends at byte ", done));
    done += static_cast<size_t>(count);
  }
}

}  // namespace

struct FileMapping::Pages {
  Pages(FileDescriptor file, const struct stat& at_opening, std::span<const std::byte> range)
      : fd(std::move(file)), opened(at_opening), bytes(range), lost(range) {}

  FileDescriptor fd;
  struct stat opened;
  std::span<const std::byte> bytes;
  LostPages lost;
};

void FileMapping::Unmap::operator()(Pages* pages) const {
  const std::span<const std::byte> bytes = pages->bytes;
  delete pages;  // stops watching before another mapping may get the same addresses
  // The only failure of munmap is a range that is not page-aligned, which ours is by construction.
  ::munmap(const_cast<std::byte*>(bytes.data()), bytes.size());
}

void FileMapping::Copy::operator()(std::byte* bytes) const { ::operator delete[](bytes, kCopyAlignment); }

FileMapping FileMapping::open(const std::string& path, Reading reading) {
  DYNO_CHECK(GgufError, path.find('\0') == std::string::npos, "[gguf] path contains a NUL character");
  // Without O_NONBLOCK, opening a named pipe would wait for a writer before fstat can reject it.
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  DYNO_CHECK(GgufError, fd.get() >= 0, "[gguf] cannot open ", path, ": ", std::strerror(errno), advice(path));
  const struct stat status = status_of(fd, path);
  DYNO_CHECK(GgufError, !S_ISDIR(status.st_mode), "[gguf] ", path, " is a folder; give the path of a .gguf file in it");
  DYNO_CHECK(GgufError, S_ISREG(status.st_mode), "[gguf] ", path, " is not a regular file");
  DYNO_CHECK(GgufError, status.st_size > 0, "[gguf] ", path, ": the file is empty");
  const auto size = static_cast<size_t>(status.st_size);
  FileMapping mapping(path, {});
  if (reading == Reading::copy) {
    mapping.copy_.reset(static_cast<std::byte*>(::operator new[](size, kCopyAlignment, std::nothrow)));
    DYNO_CHECK(OutOfMemoryError, mapping.copy_ != nullptr, "[gguf] cannot allocate ", size, " bytes to read ", path,
               " into; map the file instead (mmap=true)");
    mapping.bytes_ = {mapping.copy_.get(), size};
    read_whole(fd, path, mapping.copy_.get(), size);
    if (const std::string how = difference(status, status_of(fd, path)); !how.empty()) fail_changed(path, how);
    return mapping;
  }
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  DYNO_CHECK(GgufError, address != MAP_FAILED, "[gguf] cannot map ", size, " bytes of ", path, ": ",
             std::strerror(errno));
  mapping.bytes_ = {static_cast<const std::byte*>(address), size};
  mapping.pages_.reset(new Pages(std::move(fd), status, mapping.bytes_));
  return mapping;
}

FileMapping FileMapping::borrow(std::span<const std::byte> bytes, std::string name) { return {std::move(name), bytes}; }

void FileMapping::check_unchanged() const {
  if (pages_ == nullptr) return;
  if (const std::string how = difference(pages_->opened, status_of(pages_->fd, path_)); !how.empty()) {
    fail_changed(path_, how);
  }
  // The size may be the old one again, or the disk failed.
  if (pages_->lost.lost()) fail_changed(path_, "some of its pages could not be read");
}

bool FileMapping::contains(std::span<const std::byte> range) const {
  const auto begin = reinterpret_cast<uintptr_t>(bytes_.data());
  const auto first = reinterpret_cast<uintptr_t>(range.data());
  return first >= begin && first - begin <= bytes_.size() && range.size() <= bytes_.size() - (first - begin);
}

bool FileMapping::advise_drop(std::span<const std::byte> range) const {
  if (!mapped()) return true;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = (first + page - 1) / page * page;
  const uintptr_t end = (first + range.size()) / page * page;
  return begin >= end || ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) == 0;
}

bool FileMapping::advise_willneed(std::span<const std::byte> range) const {
  if (!mapped() || range.empty()) return true;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(range.data());
  const uintptr_t begin = first / page * page;
  return ::madvise(reinterpret_cast<void*>(begin), first + range.size() - begin, MADV_WILLNEED) == 0;
}

}  // namespace dyno
