// Equal copies of read-only memory on several NUMA nodes, of which each thread reads its own node's.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace dyno {

// The node of the calling thread, as an index into the nodes of its pool; 0 for threads of no pool.
size_t this_thread_node();
void set_this_thread_node(size_t node);

class NumaCopies {
 public:
  // `copies[i]`: on the node i + 1, as long as `first`, which is the copy of node 0. Pieces come in any order.
  void add(std::span<const std::byte> first, std::vector<const std::byte*> copies);

  bool empty() const { return pieces_.empty(); }
  // The place in the copy of the calling thread's node that `address`, in the first copy, stands for. Memory without
  // copies is everybody's.
  const std::byte* here(const std::byte* address) const;

 private:
  struct Piece {
    std::span<const std::byte> first;
    std::vector<const std::byte*> copies;
  };
  std::vector<Piece> pieces_;  // by address
};

}  // namespace dyno
