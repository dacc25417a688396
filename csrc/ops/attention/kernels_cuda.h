// CUDA kernels of attention, and the division of a batch into tiles, which the host shares.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// A tile has up to `rows` query rows of one run and one kv head; row r of a run is token r / group, head r % group.
struct AttentionTiles {
  int64_t rows = 1;
  int64_t group = 1;

  int64_t of_run(int64_t n_tokens) const { return (n_tokens * group + rows - 1) / rows; }
  // Upper bound of the tiles of any batch with m tokens in n_runs runs; exact for one run.
  int64_t bound(int64_t m, int64_t n_runs) const {
    if (n_runs == 1) return of_run(m);
    const int64_t apart = m * of_run(1), together = m * group / rows + n_runs;
    return apart < together ? apart : together;
  }
};

// Largest head size of the kernels, and rows in a tile of attention_rows_cuda.
inline constexpr int64_t kCudaMaxHead = 1024;
inline constexpr int kCudaRowTile = 8;

// Bytes of workspace for the parts of rows that independent blocks, or clusters, write.
inline size_t attention_partials_bytes(const AttentionDesc& desc, int64_t tile_rows, int splits) {
  if (splits == 1) return 0;
  const AttentionTiles tiles{tile_rows, desc.heads / desc.kv_heads};
  const int64_t rows = tiles.bound(desc.m, desc.m) * desc.kv_heads * splits * tile_rows;
  return static_cast<size_t>(rows * (2 + desc.dv)) * sizeof(float);
}
// ---- Flash attention (flash.cuh): f16 or bf16 products on tensor cores --------------------------------------------

inline constexpr int64_t kFlashMaxHead = 256;
inline constexpr int64_t kFlashWideHead = 512;  // for flash_wide.cuh

// Sizes to which key heads, and their value heads, are padded. Expanded latent attention has 192 and 128.
constexpr int flash_head(int64_t dk, int64_t dv) {
  const int64_t widest = dk > dv ? dk : dv;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : dk <= 192 && dv <= 128 ? 192 : widest <= 256 ? 256 : 512;
}
constexpr int flash_value_head(int head) { return head == 192 ? 128 : head; }
constexpr int flash_keys(int head) { return head <= 128 ? 64 : 32; }
// Keys and values of a step, then the queries.
constexpr size_t flash_shared_bytes(int head, int rows) {
  const size_t key_pitch = static_cast<size_t>(head) + 8, value_pitch = static_cast<size_t>(flash_value_head(head)) + 8;
  return (static_cast<size_t>(flash_keys(head)) * (key_pitch + value_pitch) + static_cast<size_t>(rows) * key_pitch) *
         2;
}
// Whether products use bfloat16: required for a bfloat16 cache; used for all but f16 caches with GGML_CUDA_FORCE_BF16.
bool flash_in_bf16(const AttentionDesc& desc);
// ---- The same on Hopper chips (flash_wgmma.cuh) -------------------------------------------------------------------

// Upper bound of the shared memory of any of its blocks.
inline constexpr size_t kFlashWgmmaShared = 232448;
constexpr int flash_wgmma_keys(int head, int row_groups) { return row_groups == 2 && head <= 192 ? 128 : 64; }
constexpr int flash_wgmma_stages(int head, int row_groups) {
  return row_groups == 2 ? (head == 64 ? 4 : 2) : head <= 192 ? 4 : 3;
}
// The keys of a part are a multiple of this: both computing warpgroups have as many steps.
constexpr int flash_split_step(int keys_of_step) { return 2 * keys_of_step; }
inline constexpr int kFlashMostSplits = 32;
void attention_flash_wgmma_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                                CudaStream& stream);

// ---- The same over f32 caches, with f16 pairs (flash_pairs.cuh) ---------------------------------------------------

inline constexpr int64_t kFlashPairsMaxHead = 192;  // for keys; 128 for values
inline constexpr int kFlashPairsKeys = 32;          // in one step
// Keys, values and queries as high parts and rests, and a factor per row.
constexpr size_t flash_pairs_shared_bytes(int head, int rows) {
  const size_t key_pitch = static_cast<size_t>(head) + 8, value_pitch = static_cast<size_t>(flash_value_head(head)) + 8;
  const size_t rows_of_keys = static_cast<size_t>(rows) + kFlashPairsKeys;
  return (rows_of_keys * key_pitch + kFlashPairsKeys * value_pitch) * 4 + static_cast<size_t>(rows) * 4;
}
void attention_flash_pairs_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                                CudaStream& stream);

// The same on Hopper chips (flash_wgmma_pairs.cuh), in blocks of this many query rows and steps of this many keys.
inline constexpr int kFlashWgmmaPairsRows = 128, kFlashWgmmaPairsKeys = 64;
void attention_flash_wgmma_pairs_cuda(const AttentionArgs& args, const AttentionDesc& desc, int splits,
                                      CudaStream& stream);

void attention_flash_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, CudaStream& stream);

// ---- Direct (direct.cuh): few rows over a long cache --------------------------------------------------------------

// Maximum tokens of a launch that also computes norm, rotation and store (family rope_attention).
inline constexpr int kFusedAttentionTokens = 8;

inline constexpr int kDirectWarps = 8;
inline constexpr int64_t kDirectMaxHead = 512, kDirectMaxFusedHead = 256;
inline constexpr int64_t kDirectMaxMixedHead = 256;  // for keys and values of two types
// The size to which heads of `dim` are padded, and the number of warps that share a tile of their keys.
constexpr int direct_head(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 256 ? 256 : 512; }
constexpr int direct_sharers(int head) { return head <= 256 ? 1 : 2; }
// A part of the keys has at least so many tiles of 16 keys: one for each warp, or for each pair that shares a tile.
constexpr int direct_block_tiles(int head) { return kDirectWarps / direct_sharers(head); }
// Tiles of 16 q8_0 rows of each cache for which a warp has shared memory (direct_stage.cuh), and the pieces of 16 bytes
// of such a row.
inline constexpr int kStagedTiles = 2;
constexpr int direct_staged_pieces(int width) { return (width / 32 * 34 + 15) / 16; }
// One float for each value of each team's rows, or before that the staged rows of `staged` caches.
constexpr size_t direct_common_bytes(int head, int rows, int staged) {
  const int sharers = direct_sharers(head),
            pieces = kDirectWarps * kStagedTiles * 16 * direct_staged_pieces(head / sharers);
  const auto merged = static_cast<size_t>(kDirectWarps / sharers * rows * (head + 4)) * sizeof(float);
  const auto ring = static_cast<size_t>(staged * pieces) * 16;
  return merged > ring ? merged : ring;
}
// The same, then the scores that the warps of a team exchange.
constexpr size_t direct_shared_bytes(int head, int rows, int staged = 0) {
  const int exchanged = direct_sharers(head) == 1 ? 0 : 2 * kDirectWarps * rows * 16;
  return direct_common_bytes(head, rows, staged) + static_cast<size_t>(exchanged) * sizeof(float);
}
// Blocks that must fit the registers of a multiprocessor. A step of many sequences has more blocks than
// multiprocessors; if they ran one at a time, their latencies would add up.
constexpr int direct_blocks(int head, int rows, bool fused, bool staged) {
  return head <= 128 && rows == 8 && (!fused || staged) ? 2 : 1;
}
inline constexpr size_t kDirectStaticBytes = 4096;  // upper bound of the static shared memory of a block
// Additional shared memory of fused kernels (direct.cuh): queries, a key row per warp, stored rows, angles.
constexpr size_t direct_fresh_bytes(int head, int rows) {
  const size_t width = static_cast<size_t>(head), floats = (static_cast<size_t>(rows) + kDirectWarps) * (width + 4);
  return floats * 4 + 2 * kFusedAttentionTokens * (2 * width + 16) + kFusedAttentionTokens * width * 4;
}
void attention_direct_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                           CudaStream& stream);
void rope_attention_direct_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int rows, int splits,
                                CudaStream& stream);

inline constexpr int kStepsRows = 8;  // maximum of query rows per kv head
// Steps (steps.cuh): one token per run, keys in one part. Returns false without a launch if runs or shapes do not
// match.
bool attention_steps_cuda(const AttentionArgs& args, const AttentionDesc& desc, CudaStream& stream);

// ---- Token (token.cuh): one token with norm, rotation and store ---------------------------------------------------

inline constexpr int kTokenRows = 8;  // maximum of query rows per kv head
// With `clusters`, the splits are a multiple of kClusterBlocks, and each kClusterBlocks of them form a cluster.
void rope_attention_token_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int splits, bool clusters,
                               CudaStream& stream);

// ---- Latent (latent.cuh): values are part of wide keys that many heads share --------------------------------------

inline constexpr int64_t kLatentMaxKey = 576, kLatentMaxValue = 512;
inline constexpr int64_t kLatentMaxRotary = 128;  // for fused kernels
inline constexpr int kMostSplits = 132;           // of the keys of a tile, for direct and token too
inline constexpr int kLatentRows = 16;
// The queries as fragments; two values per number for a float32 cache.
constexpr size_t latent_shared_bytes(DType type) {
  return static_cast<size_t>(kLatentMaxKey / 32) * 2 * 32 * 16 * (type == DType::f32 ? 2 : 1);
}
void attention_latent_cuda(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream);

// ---- The same by clusters of blocks (latent_cluster.cuh) ----------------------------------------------------------

inline constexpr int kClusterBlocks = 8;  // in a cluster
inline constexpr int kMostClusters = 16;  // per tile
inline constexpr int kClusterKeys = 32;   // in one step of a block
inline constexpr int kClusterStages = 2;
inline constexpr int kLatentPadBytes = 16;  // after each row in shared memory
// Rows of the cache, scores of each warp, weights, parts of the cluster's blocks; for fused kernels also new rows and
// angles.
constexpr size_t latent_cluster_shared_bytes(DType type, bool fused) {
  const size_t row = static_cast<size_t>(kLatentMaxKey) * (type == DType::f32 ? 4 : 2) + kLatentPadBytes;
  const size_t rows = kClusterStages * kClusterKeys * row;
  const size_t scores = 8 * kLatentRows * (kClusterKeys + 8) * 4;
  const size_t fresh = kFusedAttentionTokens * (row + kLatentMaxRotary / 2 * 8);
  constexpr size_t kSent = kLatentRows * (kLatentMaxValue * 4 + kClusterBlocks * 16) + 16;
  return rows + scores + kLatentRows * (kClusterKeys + 8) * 2 + kSent + (fused ? fresh : 0);
}
void attention_latent_cluster_cuda(const AttentionArgs& args, const AttentionDesc& desc, int clusters,
                                   CudaStream& stream);
void rope_attention_latent_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int clusters,
                                CudaStream& stream);

// ---- Rows ---------------------------------------------------------------------------------------------------------

// f32 arithmetic throughout, for any head size and cache type.
void attention_rows_cuda(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream);

}  // namespace dyno::ops
