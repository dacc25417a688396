#include "ops/attention/cpu_launch.h"

#include <algorithm>

#include "core/error.h"
#include "ops/attention/kernels.h"
#include "ops/parallel.h"
#include "ops/runs.h"

namespace dyno::ops {

namespace {

// Partial results of the decode variant that are alive together; more rows are done in rounds.
constexpr int64_t kPartialFloats = int64_t{1} << 18;

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
  // Within a run the last rows come first: they see the most keys, so they are the longest.
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

// The keys of a decode task in up to `splits` parts of `least` blocks or more, the longest first; no two differ by more
// than a block.
struct KeyParts {
  int64_t begin, end, blocks, parts;

  KeyParts(int64_t begin, int64_t end, int64_t splits, int64_t least)
      : begin(begin),
        end(end),
        blocks(ceil_div(end - begin, kDecodeKeys)),
        parts(std::clamp<int64_t>(blocks / least, 1, splits)) {}
  int64_t first(int64_t part) const { return std::min(end, begin + ceil_div(blocks * part, parts) * kDecodeKeys); }
};

// Multiply-adds that are worth waking a thread for.
constexpr int64_t kThreadWork = int64_t{1} << 16;

// Multiply-adds of a launch; a window makes it an upper bound, which costs no more than a thread woken in vain.
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

int64_t most_decode_heads(int64_t kv_heads) {
  int64_t most = 1;
  for (int64_t heads = 2; heads <= std::min<int64_t>(kv_heads, 8); ++heads) {
    if (kv_heads % heads == 0) most = heads;
  }
  return most;
}

DecodeLayout::DecodeLayout(const AttentionDesc& desc, int64_t splits) {
  const int64_t heads = most_decode_heads(desc.kv_heads);
  private_floats = heads * kDecodeRows * (round_up(desc.dk, 16) + kDecodeKeys) + round_up(desc.dv, 16);
  row_floats = kPartialHead + round_up(desc.dv, 16);
  part_floats = kDecodeRows * row_floats;
  tile_floats = splits * part_floats;
  const int64_t group = desc.heads / desc.kv_heads;
  const int64_t most_tiles = desc.kv_heads * std::min(desc.m * ceil_div(group, kDecodeRows), desc.m * group);
  tiles_per_round = std::clamp<int64_t>(kPartialFloats / tile_floats, 1, std::max<int64_t>(most_tiles, 1));
}

void launch_blocked(int64_t q_tile, int64_t k_block, const AttentionDesc& desc, const AttentionArgs& args,
                    CpuContext& context) {
  const AttentionTask base = task_of(desc, args);
  const Tiles tiles{desc, args, q_tile};
  parallel_items(context, tiles.count(), total_work(desc, args), kThreadWork, [&](int64_t item, std::byte* scratch) {
    const AttentionTask task = tiles.get(base, item);
    DYNO_DISPATCH_ISA(context.isa, attention_blocked(task, q_tile, k_block, reinterpret_cast<float*>(scratch)));
  });
}

void launch_decode(int64_t splits, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context) {
  const DecodeLayout layout(desc, splits);
  const AttentionTask base = task_of(desc, args);
  const Tiles tiles{desc, args, kDecodeRows};
  // The partial results lie behind the first thread's private part; its own share of the scratch holds them all.
  float* partials = reinterpret_cast<float*>(context.scratch) + layout.private_floats;
  const int64_t work = total_work(desc, args);
  const int64_t all = tiles.count();
  // Another thread may read what a part adds up, so parts are longer where many heads make items enough.
  const int64_t least = std::clamp<int64_t>(2 * desc.kv_heads / splits, 1, 4);
  const auto parts_of = [&](const AttentionTask& task) {
    return KeyParts(task.key_begin, task.key_end, splits, least);
  };
  // Heads of a position lie next to each other: a thread that takes them all reads one stream. As many as leave every
  // thread two items at least.
  int64_t parts = 0;
  for (int64_t tile = 0; tile < all; tile += desc.kv_heads) parts += parts_of(tiles.get(base, tile)).parts;
  int64_t together = 1;
  for (int64_t heads = 2; heads <= std::min(most_decode_heads(desc.kv_heads), layout.tiles_per_round); ++heads) {
    const bool enough = desc.kv_heads / heads * parts >= 2 * int64_t{context.threads};
    if (desc.kv_heads % heads == 0 && enough) together = heads;
  }
  const int64_t round_tiles = layout.tiles_per_round / together * together;
  for (int64_t first = 0; first < all; first += round_tiles) {
    const int64_t round = std::min(round_tiles, all - first);
    const int64_t groups = round / together;
    parallel_items(context, groups * splits, work, kThreadWork, [&](int64_t item, std::byte* scratch) {
      const int64_t tile = item % groups * together, part = item / groups;
      AttentionTask task = tiles.get(base, first + tile);
      const KeyParts keys = parts_of(task);
      if (part >= keys.parts) return;
      task.kv_heads = together;
      task.key_begin = keys.first(part);
      task.key_end = keys.first(part + 1);
      float* partial = partials + tile * layout.tile_floats + part * layout.part_floats;
      DYNO_DISPATCH_ISA(context.isa, attention_decode(task, reinterpret_cast<float*>(scratch), partial,
                                                      layout.tile_floats, layout.row_floats));
    });
    const auto combine = [&](int64_t begin, int64_t end, std::byte* scratch) {
      for (int64_t t = begin; t < end; ++t) {
        const AttentionTask task = tiles.get(base, first + t);
        const int64_t parts_done = parts_of(task).parts;
        for (int64_t row = task.row_begin; row < task.row_end; ++row) {
          const float* partial = partials + t * layout.tile_floats + (row - task.row_begin) * layout.row_floats;
          DYNO_DISPATCH_ISA(context.isa, attention_combine(task, row, partial, layout.part_floats, parts_done,
                                                           reinterpret_cast<float*>(scratch)));
        }
      }
    };
    parallel_ranges(context, round, layout.tile_floats, int64_t{1} << 15, combine);
  }
}

}  // namespace dyno::ops
