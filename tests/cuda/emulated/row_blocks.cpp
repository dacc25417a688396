// Blocks of hidden rows on memory that counts how often it comes and goes, for tests.
#include "runtime/row_blocks.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "runtime/row_blocks.cpp"

namespace {

int64_t allocations = 0, releases = 0;
size_t held = 0, most = 0;  // bytes
std::unique_ptr<dyno::runtime::RowBlocks> pool;
std::vector<dyno::runtime::RowBlocks::Block> owners;

dyno::runtime::RowBlocks::Block allocate(size_t floats) {
  const size_t bytes = floats * sizeof(float);
  if (held + bytes > most) throw dyno::OutOfMemoryError("no memory left");
  ++allocations;
  held += bytes;
  return {new float[floats], [bytes](float* at) {
            ++releases;
            held -= bytes;
            delete[] at;
          }};
}

}  // namespace

extern "C" {

// Owners 0 to `count`, without blocks. The machine has so many bytes.
void open_pool(size_t floats, size_t count, size_t bytes) {
  owners.clear();
  pool.reset();
  allocations = releases = 0;
  most = bytes;
  pool = std::make_unique<dyno::runtime::RowBlocks>(allocate, floats);
  owners.resize(count);
}
void close_pool() { pool.reset(); }
// False if there is no memory.
bool take_block(size_t owner) {
  try {
    owners[owner] = pool->take();
  } catch (const dyno::OutOfMemoryError&) {
    return false;
  }
  return true;
}
void share_block(size_t from, size_t to) { owners[to] = owners[from]; }
void leave_block(size_t owner) { owners[owner].reset(); }
float* address_of(size_t owner) { return owners[owner].get(); }
int64_t allocated() { return allocations; }
int64_t released() { return releases; }
size_t held_bytes() { return held; }
size_t pool_bytes() { return pool->bytes(); }
size_t used_bytes() { return pool->used_bytes(); }

}  // extern "C"
