// A backend runs the nodes of its devices if an op list spans several devices. A SegmentExecutor gives it the list
// piece by piece, in order. GPU work is only started by a call; CPU work is complete when the call returns.
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

// The addresses of values on all backends. GPUs and the host share one address space.
class ValueMemory {
 public:
  virtual ~ValueMemory() = default;
  virtual std::byte* address_of(plan::ValueId value) const = 0;
  // As Backend::values_locked() of the CPU.
  virtual bool host_locked() const = 0;
};

// Adjacent matrices of one weight.
struct MatrixRange {
  int64_t first = 0, count = 0;
};

// A copy of `count` matrices from one weight to another.
struct MatrixMove {
  int64_t from = 0, to = 0, count = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // As in Executor.
  virtual void prepare(const plan::Selection& selection, int max_threads, bool clear_cache) = 0;
  virtual void use_graphs(bool wanted, bool concurrent) = 0;
  virtual void finish() = 0;
  // As in Executor, for the layers of this backend; `to` and `from` hold the states of all layers.
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

  // Called before the first piece: `memory` knows the addresses of values on other backends. It must outlive the
  // backend.
  virtual void connect(const ValueMemory& memory) = 0;
  // The address of a value of this backend.
  virtual std::byte* memory_of(plan::ValueId value) const = 0;

  // For the CPU: whether its values are page-locked, so that copies to and from a GPU need no intermediate buffer.
  virtual bool values_locked() const { return true; }
  // Warnings for the user about the memory that prepare() allocated.
  virtual std::vector<std::string> warnings() const { return {}; }

  // As Executor's logits_memory() and device_logits_memory().
  virtual std::shared_ptr<float[]> host_logits(size_t count) { return std::make_shared_for_overwrite<float[]>(count); }
  virtual std::shared_ptr<float[]> device_logits(size_t count) { return host_logits(count); }

  // Starts a u-batch; `batch` stays valid until end().
  virtual void begin(const MicroBatch& batch, const plan::Selection& selection, int threads) = 0;
  // Runs nodes [begin, end) of a list, all on one device of this backend, with `tokens` rows.
  virtual void run_nodes(const plan::NodeList& list, int32_t begin, int32_t end, int64_t tokens) = 0;
  // Compacts the rows whose logits are wanted, in the given values that belong to this backend.
  virtual void select_rows(std::span<const plan::ValueId> values) = 0;
  // Ends the u-batch. Copies of logits and routing to the caller's memory have been started.
  virtual void end() = 0;

  // For a GPU: waits until no started copy reads or writes host memory, except copies of a piece that was started
  // ahead.
  virtual void await_host_copies() {}
  // For a GPU: run_nodes() while the CPU still computes inputs of the piece. The piece itself waits for them until
  // finish_host_turn(), which must be called after an error as well. Returns false and starts nothing if the backend
  // does not support this.
  virtual bool start_ahead(const plan::NodeList&, int32_t, int32_t, int64_t) { return false; }
  virtual void finish_host_turn() {}
  // Work that is started from now on begins after all started work of `other`, another GPU.
  virtual void follow(Backend&) {}
  // For the CPU, which multiplies by the experts that are not cached.
  virtual ExpertCounts expert_counts() const { return {}; }
  // For the CPU: a weight in the layout of its kernels.
  virtual const std::byte* weight_memory(model::WeightId) const { return nullptr; }
  // For the main device and the streamed list. copies_follow_launches(): copies from now on begin after all launches so
  // far. bring(): starts a copy of `ranges` of the weight's `matrices` at `from`. await_copies(): launches from now on
  // wait for the copies of a weight.
  virtual void copies_follow_launches() {}
  virtual void bring(model::WeightId weight, const std::byte* from, int64_t matrices,
                     std::span<const MatrixRange> ranges) = 0;
  // The same for matrices that this device already has, in the weight `own`; no link is used.
  virtual void bring_own(model::WeightId weight, model::WeightId own, std::span<const MatrixMove> moves) = 0;
  // Sets the places of a layer's experts for later launches, in its table of Plan::shared_experts.
  virtual void set_places(int32_t layer, std::span<const int32_t> places) = 0;
  virtual void await_copies(model::WeightId weight) = 0;
  // For the main device with an adaptive expert cache: how often each expert of a layer was chosen since the last call,
  // in lists that divide its experts. Only counts that are available without a wait; may be empty if there are none.
  virtual std::vector<int64_t> take_choices(int32_t) { return {}; }
  // Sets the places of a layer's cached experts for later launches.
  virtual void set_cached_places(int32_t, std::span<const int32_t>) { refuse_swaps(); }
  // Starts a copy of a matrix of a weight to a place of `own`. Launches do not read the place until the copy has
  // arrived. The pointer is the weight's memory on the CPU; null: the weight is on this device.
  virtual void fill_place(model::WeightId, const std::byte*, int64_t, model::WeightId, int64_t) { refuse_swaps(); }
  virtual bool has_arrived(model::WeightId) const { return true; }

  // Copies a value from byte `begin` on to host memory, and waits for the copy.
  virtual void read(plan::ValueId value, size_t begin, std::span<std::byte> out) = 0;

 private:
  [[noreturn]] static void refuse_swaps() { throw Error("[experts] the cached experts of this device do not change"); }
};

}  // namespace dyno::runtime
