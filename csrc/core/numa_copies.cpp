#include "core/numa_copies.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace dyno {
namespace {

thread_local size_t node_of_this_thread = 0;

}  // namespace

size_t this_thread_node() { return node_of_this_thread; }
void set_this_thread_node(size_t node) { node_of_this_thread = node; }

void NumaCopies::add(std::span<const std::byte> first, std::vector<const std::byte*> copies) {
  if (first.empty()) return;
  const auto before = [](const Piece& a, const Piece& b) { return std::less<>()(a.first.data(), b.first.data()); };
  Piece piece{first, std::move(copies)};
  pieces_.insert(std::upper_bound(pieces_.begin(), pieces_.end(), piece, before), std::move(piece));
}

const std::byte* NumaCopies::here(const std::byte* address) const {
  const size_t node = this_thread_node();
  if (node == 0) return address;
  const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), address, [](const std::byte* a, const Piece& b) {
    return std::less<>()(a, b.first.data());
  });
  if (after == pieces_.begin()) return address;
  const Piece& piece = *std::prev(after);
  const auto offset = static_cast<size_t>(address - piece.first.data());
  if (offset >= piece.first.size() || node > piece.copies.size()) return address;
  return piece.copies[node - 1] + offset;
}

}  // namespace dyno
