// Groups token rows by expert (a counting sort to the workspace of the launch); shared by matmul_id and moe_up_gate. A
// row with the id kNoExpert has no expert here: another device computes it, and its result here is zero.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/error.h"
#include "ops/args.h"
#include "ops/parallel.h"

namespace dyno::ops {

inline constexpr int32_t kNoExpert = -1;

// A flat row is token * used + slot.
class ExpertGroups {
 public:
  // Throws PlanError for an id outside [0, experts) that is not kNoExpert.
  ExpertGroups(const int32_t* ids, int64_t m, int64_t used, int64_t experts, int32_t* workspace)
      : first_(workspace), active_(workspace + experts + 1), order_(workspace + 2 * experts + 2) {
    const int64_t rows = m * used;
    for (int64_t e = 0; e <= experts; ++e) first_[e] = 0;
    for (int64_t i = 0; i < rows; ++i) {
      check_id(ids[i], experts, i / used);
      if (ids[i] != kNoExpert) ++first_[ids[i]];
    }
    // Computes the end of each group; filling from the back then turns ends into starts and keeps tokens in order.
    for (int64_t e = 0; e < experts; ++e) {
      if (first_[e] > 0) active_[n_active_++] = static_cast<int32_t>(e);
      if (e > 0) first_[e] += first_[e - 1];
    }
    first_[experts] = first_[experts - 1];
    for (int64_t i = rows - 1; i >= 0; --i) {
      if (ids[i] != kNoExpert) order_[--first_[ids[i]]] = static_cast<int32_t>(i);
    }
  }

  static void check_id(int32_t id, int64_t experts, int64_t token) {
    DYNO_CHECK(PlanError, id >= kNoExpert && id < experts, "[moe] token ", token, " is routed to expert ", id, " of ",
               experts);
  }

  // Checks the ids of a launch and zeroes the rows of y [m, used, n] without an expert.
  static void zero_rows_of_none(CpuContext& context, const int32_t* ids, const auto& desc, float* y) {
    bool any = false;
    for (int64_t i = 0; i < desc.m * desc.used; ++i) {
      check_id(ids[i], desc.experts, i / desc.used);
      any |= ids[i] == kNoExpert;
    }
    if (!any) return;
    constexpr int64_t kGrain = 64 * 1024;  // elements
    parallel_ranges(context, desc.m * desc.used, desc.n, kGrain, [&](int64_t begin, int64_t end, std::byte*) {
      for (int64_t i = begin; i < end; ++i) {
        if (ids[i] == kNoExpert) std::fill_n(y + i * desc.n, desc.n, 0.0f);
      }
    });
  }

  int64_t n_active() const { return n_active_; }
  int64_t expert(int64_t active) const { return active_[active]; }
  int64_t count(int64_t expert) const { return first_[expert + 1] - first_[expert]; }
  const int32_t* rows(int64_t expert) const { return order_ + first_[expert]; }

 private:
  int32_t* first_;   // [experts + 1]
  int32_t* active_;  // [experts]: the experts with rows
  int32_t* order_;   // [m * used] flat rows, by expert
  int64_t n_active_ = 0;
};
static_assert(sizeof(ExpertGroups) <= 64, "it lives on the stack of a launch");

}  // namespace dyno::ops
