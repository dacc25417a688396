// The head that predicts one further token (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2). It is a separate session
// with one block, which reads a token's embedding and the hidden row of the previous token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/args.h"
#include "runtime/executor.h"
#include "runtime/row_blocks.h"

namespace dyno::runtime {

class Session;

// Maximum of tokens in a draft (setting spec_max). The head's cache has additional room for them.
inline constexpr int64_t kMostDraft = 64;

// The output of a draft: logits [texts, n_vocab], or the most probable token of each text.
struct Drafts {
  float* logits = nullptr;
  Likely* likely = nullptr;
};

// The token that will follow a sequence.
struct Following {
  int32_t slot = 0;
  int32_t token = 0;
  int64_t positions = 0;  // that the sequence has now
};

// Pair t of a sequence consists of the hidden row of token t and the token t + 1. The head attends to all pairs up to
// it. It reads pairs only when a draft is requested, so a prompt costs only the copies of its rows. These rows are in
// host memory even if the model runs on a GPU: a long text has gigabytes of them, and the head mostly reads the last
// few once.
class DraftHead {
 public:
  // `head`: a session of model::Part::draft_head, with as many slots as the model.
  DraftHead(std::unique_ptr<Session> head, int64_t n_embd, size_t slots);
  ~DraftHead();

  Session& session() { return *head_; }
  const Session& session() const { return *head_; }
  // Sets `rows` to the memory for the hidden rows of these tokens, which the model computes next. Returns false for a
  // sequence whose earlier rows are missing. Throws OutOfMemoryError.
  bool make_room(const ops::SequenceRun& run, std::span<float*> rows);
  // The rows were written.
  void note(const ops::SequenceRun& run, std::span<const int32_t> tokens);
  // The rows were not written: frees the memory that was reserved for them.
  void give_back_unused(int32_t slot);
  // Bytes of the rows that sequences hold, in whole blocks.
  size_t row_bytes() const { return blocks_.used_bytes(); }
  // The sequence now has only this many positions.
  void forget(int32_t slot, int64_t positions);
  void copy(int32_t from, int32_t to, int64_t positions);
  // Whether the head has the hidden rows of a sequence with this many positions.
  bool knows(int32_t slot, int64_t positions) const;
  // Number of pairs that the head must read before a draft, without the pair of the next token.
  int64_t lacks(int32_t slot) const;
  // Reads up to `count` of these pairs now.
  void read(int32_t slot, int64_t count);
  // Drafts one token for each text, in one decode. Throws PlanError if hidden rows of a sequence are missing.
  void draft(std::span<const Following> texts, const Drafts& out);
  // Drafts one token further: `token` is the one that was just drafted. The model has not computed its hidden row yet,
  // so the head reads its own last row instead. The next draft() discards these pairs.
  void draft_further(std::span<const Following> texts, const Drafts& out);

 private:
  using Block = RowBlocks::Block;  // [kBlockRows, n_embd]; sequences may share a block, which is then read-only
  struct Sequence {
    std::vector<int32_t> tokens;
    std::vector<Block> blocks;   // of the rows of these tokens
    std::vector<int32_t> given;  // the token of each pair in the head's cache
    size_t agreeing = 0;         // length of the prefix of `given` that matches the sequence, so that a draft need not
                                 // compare a long text
    Block last;                  // [n_embd], the head's row of its last pair
    bool has_last = false;
  };

  static constexpr size_t kBlockRows = 256;

  // Extends `agreeing` after tokens or pairs were added.
  static void compare(Sequence& s);
  // Records that the head's cache has pairs of these tokens after the previous ones.
  static void give(Sequence& s, std::span<const int32_t> tokens);
  float* row(const Sequence& s, size_t token) const {
    return s.blocks[token / kBlockRows].get() + token % kBlockRows * static_cast<size_t>(n_embd_);
  }
  // Runs the head over pairs of tokens and rows, and keeps the last row of each sequence.
  void feed(std::span<const Following> texts, std::span<const std::span<const int32_t>> tokens,
            std::span<const float* const> rows, const Drafts& out);

  std::unique_ptr<Session> head_;
  int64_t n_embd_ = 0;
  RowBlocks blocks_;
  std::vector<Sequence> sequences_;
};

}  // namespace dyno::runtime
