// Blocks of hidden rows, cut from larger slabs. Page-locked memory takes long to come and to go, so it does that
// seldom.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace dyno::runtime {

class RowBlocks {
 public:
  using Block = std::shared_ptr<float[]>;
  using Allocate = std::function<Block(size_t floats)>;

  // Blocks of `floats` each, in slabs that `allocate` makes.
  RowBlocks(Allocate allocate, size_t floats);

  // A block; it goes back when its last owner is gone, who may outlive this. Throws OutOfMemoryError.
  Block take();
  // Bytes of all slabs, and of the blocks in them that somebody owns.
  size_t bytes() const;
  size_t used_bytes() const;

  // Each slab is as large as all before it together, within these bounds.
  static constexpr size_t kLeastSlab = size_t{4} << 20;
  static constexpr size_t kMostSlab = size_t{64} << 20;
  // Bytes of blocks without an owner that stay for the next text. Beyond them, a slab leaves with its last block.
  static constexpr size_t kKept = size_t{128} << 20;

 private:
  struct Slab;
  struct Slabs;

  std::shared_ptr<Slabs> slabs_;  // blocks own it too
};

}  // namespace dyno::runtime
