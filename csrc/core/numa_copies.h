// Copies of read-only memory on several NUMA nodes. Each thread reads the copy of its own node.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace dyno {

// The node of the calling thread, as an index into the nodes of its pool; 0 for threads outside a pool.
size_t this_thread_node();
void set_this_thread_node(size_t node);

class NumaCopies {
 public:
  // Registers copies of `first`, the copy on node 0; `copies[i]` is on node i + 1 and has the same size. Pieces may
  // come in any order.
  void add(std::span<const std::byte> first, std::vector<const std::byte*> copies);

  bool empty() const { return pieces_.empty(); }
  // The address in the copy of the calling thread's node that corresponds to `address` in the first copy. Memory
  // without copies is returned unchanged.
  const std::byte* here(const std::byte* address) const;

 private:
  struct Piece {
    std::span<const std::byte> first;
    std::vector<const std::byte*> copies;
  };
  std::vector<Piece> pieces_;  // by address
};

}  // namespace dyno
