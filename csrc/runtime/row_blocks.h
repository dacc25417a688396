// Blocks of hidden rows, allocated from larger slabs, because page-locked memory is slow to allocate and free.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace dyno::runtime {

class RowBlocks {
 public:
  using Block = std::shared_ptr<float[]>;
  using Allocate = std::function<Block(size_t floats)>;

  // Blocks of `floats` each. `allocate` allocates the slabs.
  RowBlocks(Allocate allocate, size_t floats);

  // Returns a block. It is freed with its last owner, which may outlive this object. Throws OutOfMemoryError.
  Block take();
  // Bytes of all slabs, and of the blocks in use.
  size_t bytes() const;
  size_t used_bytes() const;

  // Each slab is as large as all previous ones together, within these bounds.
  static constexpr size_t kLeastSlab = size_t{4} << 20;
  static constexpr size_t kMostSlab = size_t{64} << 20;
  // Bytes of free blocks that are kept for the next text. Above this, a slab is freed with its last block.
  static constexpr size_t kKept = size_t{128} << 20;

 private:
  struct Slab;
  struct Slabs;

  std::shared_ptr<Slabs> slabs_;  // shared with the blocks
};

}  // namespace dyno::runtime
