#include "runtime/row_blocks.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/error.h"

namespace dyno::runtime {

struct RowBlocks::Slab {
  Block memory;
  size_t blocks = 0;
  std::vector<float*> free;  // has capacity for all blocks, so that freeing one cannot fail
};

struct RowBlocks::Slabs {
  Allocate allocate;
  size_t floats = 0;
  std::vector<std::unique_ptr<Slab>> all;
  size_t blocks = 0, free = 0;

  size_t block_bytes() const { return floats * sizeof(float); }

  Slab& add(size_t count) {
    auto slab = std::make_unique<Slab>();
    slab->memory = allocate(count * floats);
    slab->blocks = count;
    slab->free.reserve(count);
    for (size_t i = count; i-- > 0;)
      slab->free.push_back(slab->memory.get() + i * floats);  // the first block is used
                                                              // first
    all.push_back(std::move(slab));
    blocks += count;
    free += count;
    return *all.back();
  }

  Slab& with_room() {
    // Older slabs first, so that newer ones become completely free.
    for (const std::unique_ptr<Slab>& slab : all) {
      if (!slab->free.empty()) return *slab;
    }
    const size_t wanted = std::clamp(blocks * block_bytes(), kLeastSlab, kMostSlab);
    const size_t count = std::max<size_t>(wanted / block_bytes(), 1);
    if (count > 1) {
      try {
        return add(count);
      } catch (const OutOfMemoryError&) {
        // The memory may still be enough for the one block that is needed.
      } catch (const std::bad_alloc&) {
      }
    }
    try {
      return add(1);
    } catch (const std::bad_alloc&) {
      throw OutOfMemoryError(str_cat("[memory] cannot allocate ", block_bytes(),
                                     " bytes of hidden rows in addition to ", blocks * block_bytes(),
                                     "; reset sequences, or drop the head that drafts tokens"));
    }
  }

  void give_back(Slab* slab, float* block) noexcept {
    slab->free.push_back(block);
    ++free;
    if (slab->free.size() < slab->blocks || free * block_bytes() <= kKept) return;
    blocks -= slab->blocks;
    free -= slab->blocks;
    std::erase_if(all, [&](const std::unique_ptr<Slab>& each) { return each.get() == slab; });
  }
};

RowBlocks::RowBlocks(Allocate allocate, size_t floats)
    : slabs_(std::make_shared<Slabs>(Slabs{.allocate = std::move(allocate), .floats = floats, .all = {}})) {}

RowBlocks::Block RowBlocks::take() {
  Slab& slab = slabs_->with_room();
  float* block = slab.free.back();
  slab.free.pop_back();
  --slabs_->free;
  return {block, [slabs = slabs_, from = &slab](float* at) { slabs->give_back(from, at); }};
}

size_t RowBlocks::bytes() const { return slabs_->blocks * slabs_->block_bytes(); }

size_t RowBlocks::used_bytes() const { return (slabs_->blocks - slabs_->free) * slabs_->block_bytes(); }

}  // namespace dyno::runtime
