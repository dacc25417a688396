// A backend runs the nodes of its devices when an op list spans several: a SegmentExecutor hands it the list piece by
// piece, in order. Work of a GPU is only started by that; work of the CPU is over when a call returns.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "plan/plan.h"
#include "plan/selection.h"
#include "runtime/executor.h"

namespace dyno::runtime {

// Where values lie, whichever backend holds them. Addresses of GPUs and of the host are one space.
class ValueMemory {
 public:
  virtual ~ValueMemory() = default;
  virtual std::byte* address_of(plan::ValueId value) const = 0;
  // As Backend::values_locked() of the CPU.
  virtual bool host_locked() const = 0;
};

// Matrices of a weight that stand behind each other.
struct MatrixRange {
  int64_t first = 0, count = 0;
};

// So many matrices of one weight that become those of another.
struct MatrixMove {
  int64_t from = 0, to = 0, count = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // As Executor's.
  virtual void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) = 0;
  virtual void use_graphs(bool wanted, bool concurrent) = 0;
  virtual void finish() = 0;
  // As Executor's, of the layers that are this backend's; `to` and `from` hold the states of all.
  virtual void save_state(int32_t slot, std::byte* to) = 0;
  virtual void load_state(int32_t slot, const std::byte* from) = 0;
  virtual void copy_sequence(int32_t from, int32_t to, int64_t positions, std::span<const Rows> windowed) = 0;
  virtual void take(int32_t, int64_t, int64_t, CacheLayers) {}
  virtual size_t gpu_cache_bytes() const { return 0; }
  virtual void give_back(int32_t slot, int64_t begin, int64_t end, CacheLayers layers) = 0;
  virtual void settle() {}
  virtual std::vector<CaptureReport> captures() const { return {}; }
  virtual int64_t capture_failures() const { return 0; }
  virtual void fail_next_captures(int) {}

  virtual void lose(plan::DeviceId, int64_t) {}
  virtual void check_devices() const {}

  // Before the first piece: all values that nodes read and others hold. Must outlive the backend.
  virtual void connect(const ValueMemory& memory) = 0;
  // Of a value of this backend.
  virtual std::byte* memory_of(plan::ValueId value) const = 0;

  // Of the CPU: whether its values are page-locked, so that copies between them and a GPU need no detour.
  virtual bool values_locked() const { return true; }
  // Warnings for the user about the memory that prepare() got.
  virtual std::vector<std::string> warnings() const { return {}; }

  // As Executor's logits_memory() and device_logits_memory().
  virtual std::shared_ptr<float[]> host_logits(size_t count) { return std::make_shared_for_overwrite<float[]>(count); }
  virtual std::shared_ptr<float[]> device_logits(size_t count) { return host_logits(count); }

  // A u-batch begins; `batch` stays valid until end().
  virtual void begin(const MicroBatch& batch, const plan::Selection& selection, int threads) = 0;
  // Nodes [begin, end) of a list, all of one device of this backend, with `tokens` rows.
  virtual void run_nodes(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) = 0;
  // Moves the rows whose logits are wanted together, in those of the values that are this backend's.
  virtual void select_rows(std::span<const plan::ValueId> values) = 0;
  // Logits and routing are on their way to the caller's memory.
  virtual void end() = 0;

  // Of a GPU. Waits until no copy that was started reads or writes memory of the host, but those of a piece that was
  // started ahead.
  virtual void await_host_copies() {}
  // Of a GPU: run_nodes() while the CPU still computes what the piece reads; the piece waits for that by itself until
  // finish_host_turn(), which also an error has to be followed by. False, and nothing is started, where it cannot.
  virtual bool start_ahead(const plan::NodeList&, int32_t, int32_t, int64_t) { return false; }
  virtual void finish_host_turn() {}
  // Work that is started from now on begins when all work that `other`, another GPU, has started is over.
  virtual void follow(Backend&) {}
  // Of the CPU, which multiplies by the experts that are not cached.
  virtual ExpertCounts expert_counts() const { return {}; }
  // Of the CPU: a weight as its kernels read it.
  virtual const std::byte* weight_memory(model::WeightId) const { return nullptr; }
  // Of the main device, for the streamed list. Copies that are brought from now on begin when all launches so far are
  // over; a copy of such matrices of a weight is started, out of `matrices` at `from`; launches from now on wait for
  // the copies of a weight.
  virtual void copies_follow_launches() {}
  virtual void bring(model::WeightId weight, const std::byte* from, int64_t matrices,
                     std::span<const MatrixRange> ranges) = 0;
  // Likewise of matrices that this device has already, in the weight `own`; no link is crossed.
  virtual void bring_own(model::WeightId weight, model::WeightId own, std::span<const MatrixMove> moves) = 0;
  // The places of a layer's experts for launches from now on, in its table of Plan::shared_experts.
  virtual void set_places(int32_t layer, std::span<const int32_t> places) = 0;
  virtual void await_copies(model::WeightId weight) = 0;
  // Of the main device, where the expert cache adapts. How often each expert of a layer was chosen in lists that divide
  // its experts, since the last call, as far as that is known without a wait; may be empty if never.
  virtual std::vector<int64_t> take_choices(int32_t) { return {}; }
  // The places of a layer's cached experts for launches from now on.
  virtual void set_cached_places(int32_t, std::span<const int32_t>) { refuse_swaps(); }
  // A copy of a matrix of a weight to a place of `own` is started, which launches from now on do not read until the
  // copy has arrived. The weight is the CPU's, with its memory there; null: it is this device's.
  virtual void fill_place(model::WeightId, const std::byte*, int64_t, model::WeightId, int64_t) { refuse_swaps(); }
  virtual bool has_arrived(model::WeightId) const { return true; }

  // A value from a byte on, to host memory; returns when it is there.
  virtual void read(plan::ValueId value, size_t begin, std::span<std::byte> out) = 0;

 private:
  [[noreturn]] static void refuse_swaps() { throw Error("[experts] the cached experts of this device do not change"); }
};

}  // namespace dyno::runtime
