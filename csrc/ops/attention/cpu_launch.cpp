#include "ops/attention/cpu_launch.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "ops/attention/decode_cut.h"
#include "ops/attention/kernels.h"
#include "ops/parallel.h"
#include "ops/runs.h"

namespace dyno::ops {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

CacheType cache_type(DType type) {
  switch (type) {
    case DType::f32:
      return CacheType::f32;
    case DType::f16:
      return CacheType::f16;
    case DType::bf16:
      return CacheType::bf16;
    case DType::q8_0:
      return CacheType::q8_0;
    default:
      throw UnsupportedError(str_cat("[attention] no cache of type ", dtype_name(type)));
  }
}

AttentionTask task_of(const AttentionDesc& desc, const AttentionArgs& args) {
  AttentionTask task{};
  task.args = &args;
  task.group = desc.heads / desc.kv_heads;
  task.dk = desc.dk;
  task.dv = desc.dv;
  task.k_type = cache_type(desc.k_type);
  task.v_type = desc.v_in_k ? task.k_type : cache_type(desc.v_type);
  task.v_in_k = desc.v_in_k;
  task.sinks = desc.sinks;
  task.windowed = desc.windowed;
  task.softcap = desc.softcap;
  task.k_head_bytes = static_cast<int64_t>(row_bytes(desc.k_type, desc.dk));
  task.v_head_bytes = desc.v_in_k ? 0 : static_cast<int64_t>(row_bytes(desc.v_type, desc.dv));
  return task;
}

// The tiles of a batch: for each run, blocks of `tile_rows` rows of each kv head.
struct Tiles {
  const AttentionDesc& desc;
  const AttentionArgs& args;
  int64_t tile_rows;

  int64_t row_blocks(const SequenceRun& run) const {
    return ceil_div(run.n_tokens * (desc.heads / desc.kv_heads), tile_rows);
  }
  int64_t count() const {
    int64_t tiles = 0;
    for (int32_t r = 0; r < args.n_runs; ++r) tiles += row_blocks(args.runs[r]) * desc.kv_heads;
    return tiles;
  }
  // The last rows of a run come first, because they read the most keys and take the longest.
  AttentionTask get(AttentionTask task, int64_t tile) const {
    const SequenceRun* run = args.runs;
    while (tile >= row_blocks(*run) * desc.kv_heads) {
      tile -= row_blocks(*run) * desc.kv_heads;
      ++run;
    }
    const int64_t block = row_blocks(*run) - 1 - tile / desc.kv_heads;
    task.run = *run;
    task.kv_head = tile % desc.kv_heads;
    task.row_begin = block * tile_rows;
    task.row_end = std::min<int64_t>(task.row_begin + tile_rows, run->n_tokens * task.group);
    task.key_end = run->position + (task.row_end - 1) / task.group + 1;
    const int64_t first_position = run->position + task.row_begin / task.group;
    task.key_begin = task.windowed ? std::max<int64_t>(0, first_position - args.window + 1) : 0;
    return task;
  }
};

// Minimum multiply-adds for which waking a thread pays off.
constexpr int64_t kThreadWork = int64_t{1} << 16;

// Multiply-adds of a launch; an upper bound if there is a window, which at worst wakes a thread unnecessarily.
int64_t total_work(const AttentionDesc& desc, const AttentionArgs& args) {
  int64_t pairs = 0;
  for (int32_t r = 0; r < args.n_runs; ++r) {
    pairs += int64_t{args.runs[r].n_tokens} * (args.runs[r].position + args.runs[r].n_tokens);
  }
  return pairs * desc.heads * (desc.dk + desc.dv);
}

}  // namespace

int64_t blocked_floats(int64_t q_tile, int64_t k_block, int64_t dk, int64_t dv) {
  const int64_t rows = round_up(q_tile, kBlockedPanel), dk_pad = round_up(dk, 16), dv_pad = round_up(dv, 16);
  return rows * dk + k_block * (dk_pad + dv_pad + kBlockedPanel) + rows * dv_pad + 4 * rows + 6 * 16;
}

void launch_blocked(int64_t q_tile, int64_t k_block, const AttentionDesc& desc, const AttentionArgs& args,
                    CpuContext& context) {
  const auto few = [&](const SequenceRun& run) { return run.n_tokens * (desc.heads / desc.kv_heads) <= kDecodeRows; };
  for (int32_t first = 0, end = 0; first < args.n_runs; first = end) {
    const bool decode = few(args.runs[first]);
    while (end < args.n_runs && few(args.runs[end]) == decode) ++end;
    AttentionArgs part = args;
    part.runs = args.runs + first;
    part.n_runs = end - first;
    if (decode) {
      launch_decode(kFewRowsSplits, desc, part, context);
      continue;
    }
    const AttentionTask base = task_of(desc, part);
    const Tiles tiles{desc, part, q_tile};
    parallel_items(context, tiles.count(), total_work(desc, part), kThreadWork, [&](int64_t item, std::byte* scratch) {
      const AttentionTask task = tiles.get(base, item);
      DYNO_DISPATCH_ISA(context.isa, attention_blocked(task, q_tile, k_block, reinterpret_cast<float*>(scratch)));
    });
  }
}

// ---- gather --------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kGatherKeys = 64;  // keys of a block

// A thread's scratch: the rows of a token's positions, then what the kernel of `rows` heads needs.
struct GatherLayout {
  DecodeLayout decode;
  size_t keys;
  int64_t floats;
  GatherLayout(int64_t rows, const AttentionDesc& desc)
      : decode(desc, 1),
        keys(static_cast<size_t>(round_up(desc.selected * static_cast<int64_t>(row_bytes(desc.k_type, desc.dk)), 64))),
        floats(std::max(blocked_floats(rows, kGatherKeys, desc.dk, desc.dv),
                        decode.private_floats + decode.tile_floats)) {}
};

}  // namespace

size_t gather_bytes(int64_t rows, const AttentionDesc& desc) {
  const GatherLayout layout(rows, desc);
  return layout.keys + static_cast<size_t>(layout.floats) * sizeof(float);
}

// Each token is computed alone, also if it reads all positions, so that its result does not depend on its batch.
void launch_gather(int64_t rows, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context) {
  const GatherLayout layout(rows, desc);
  const AttentionTask base = task_of(desc, args);
  const int64_t blocks = ceil_div(base.group, rows);
  const auto key_bytes = static_cast<size_t>(base.k_head_bytes);
  const auto compute = [&](const SequenceRun& run, int64_t i, int64_t block, std::byte* scratch) {
    const int64_t token = run.first_token + i, seen = run.position + i + 1, count = std::min(seen, desc.selected);
    AttentionArgs own = args;
    own.k_cache = args.k_cache + run.slot * args.slot_positions * args.k_row_bytes;
    if (seen > desc.selected) {
      const int32_t* positions = args.selected + token * args.selected_stride;
      for (int64_t j = 0; j < count; ++j) {
        std::memcpy(scratch + static_cast<size_t>(j) * key_bytes, own.k_cache + positions[j] * args.k_row_bytes,
                    key_bytes);
      }
      own.k_cache = scratch;
      own.k_row_bytes = base.k_head_bytes;
    }
    AttentionTask task = base;
    task.args = &own;
    task.run = {static_cast<int32_t>(token), 1, static_cast<int32_t>(count - 1), 0};
    task.kv_head = 0;
    task.kv_heads = 1;
    task.row_begin = block * rows;
    task.row_end = std::min(task.row_begin + rows, task.group);
    task.key_begin = 0;
    task.key_end = count;
    auto* floats = reinterpret_cast<float*>(scratch + layout.keys);
    if (task.row_end - task.row_begin > kDecodeRows) {
      DYNO_DISPATCH_ISA(context.isa, attention_blocked(task, rows, kGatherKeys, floats));
      return;
    }
    float* partial = floats + layout.decode.private_floats;
    DYNO_DISPATCH_ISA(context.isa,
                      attention_decode(task, floats, partial, layout.decode.tile_floats, layout.decode.row_floats));
    for (int64_t row = task.row_begin; row < task.row_end; ++row, partial += layout.decode.row_floats) {
      DYNO_DISPATCH_ISA(context.isa, attention_combine(task, row, partial, layout.decode.part_floats, 1, floats));
    }
  };
  int64_t tokens = 0, pairs = 0;
  for (int32_t r = 0; r < args.n_runs; ++r) {
    tokens += args.runs[r].n_tokens;
    pairs += args.runs[r].n_tokens *
             std::min<int64_t>(desc.selected, int64_t{args.runs[r].position} + args.runs[r].n_tokens);
  }
  parallel_items(context, tokens * blocks, pairs * desc.heads * (desc.dk + desc.dv), kThreadWork,
                 [&](int64_t item, std::byte* scratch) {
                   int64_t i = item / blocks;
                   const SequenceRun* run = args.runs;
                   for (; i >= run->n_tokens; ++run) i -= run->n_tokens;
                   compute(*run, i, item % blocks, scratch);
                 });
}

void launch_decode(int64_t splits, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context) {
  const DecodeLayout layout(desc, splits);
  const AttentionTask base = task_of(desc, args);
  const Tiles tiles{desc, args, kDecodeRows};
  const int64_t work = total_work(desc, args);
  const int64_t all = tiles.count();
  if (all == 0) return;
  const auto parts_of = [&](const AttentionTask& task) {
    return KeyParts(task.key_begin, task.key_end, desc.kv_heads, splits);
  };
  int64_t parts = 0;
  for (int64_t tile = 0; tile < all; tile += desc.kv_heads) parts += parts_of(tiles.get(base, tile)).count;
  const DecodeCut cut = cut_decode(desc.kv_heads, all, parts, layout.tiles_per_share, context.threads);
  const ThreadScratch shares(context);
  // The partial results of a tile in the round. Groups are distributed over the shares of all threads in order.
  const auto partials_of = [&](int64_t tile) {
    const int64_t group = tile / cut.heads, share = group % context.threads;
    const int64_t at = group / context.threads * cut.heads + tile % cut.heads;
    return reinterpret_cast<float*>(shares.of(static_cast<int>(share))) + layout.private_floats +
           at * layout.tile_floats;
  };
  for (int64_t first = 0; first < all; first += cut.round_groups * cut.heads) {
    const int64_t groups = std::min(cut.round_groups, (all - first) / cut.heads);
    parallel_items(context, groups * splits, work, kThreadWork, [&](int64_t item, std::byte* scratch) {
      const int64_t tile = item % groups * cut.heads, part = item / groups;
      AttentionTask task = tiles.get(base, first + tile);
      const KeyParts keys = parts_of(task);
      if (part >= keys.count) return;
      task.kv_heads = cut.heads;
      task.key_begin = keys.first(part);
      task.key_end = keys.first(part + 1);
      DYNO_DISPATCH_ISA(context.isa, attention_decode(task, reinterpret_cast<float*>(scratch),
                                                      partials_of(tile) + part * layout.part_floats, layout.tile_floats,
                                                      layout.row_floats));
    });
    const auto combine = [&](int64_t begin, int64_t end, std::byte* scratch) {
      for (int64_t tile = begin; tile < end; ++tile) {
        const AttentionTask task = tiles.get(base, first + tile);
        const float* partial = partials_of(tile);
        for (int64_t row = task.row_begin; row < task.row_end; ++row, partial += layout.row_floats) {
          DYNO_DISPATCH_ISA(context.isa, attention_combine(task, row, partial, layout.part_floats, parts_of(task).count,
                                                           reinterpret_cast<float*>(scratch)));
        }
      }
    };
    parallel_ranges(context, groups * cut.heads, layout.tile_floats, int64_t{1} << 15, combine);
  }
}

}  // namespace dyno::ops
