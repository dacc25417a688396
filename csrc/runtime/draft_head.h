// The head that predicts one token further (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2): a session of its own over
// one block, which reads a token's embedding beside the hidden row of the token before it.
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

// Tokens of a draft at most (setting spec_max), for which the head's cache has room beside what the model's holds.
inline constexpr int64_t kMostDraft = 64;

// Where drafts go: logits [texts, n_vocab], or the most probable token of each text.
struct Drafts {
  float* logits = nullptr;
  Likely* likely = nullptr;
};

// A token that is about to follow a sequence.
struct Following {
  int32_t slot = 0;
  int32_t token = 0;
  int64_t positions = 0;  // that the sequence holds
};

// Pair t of a sequence is the hidden row of its token t and its token t + 1; the head attends to the pairs up to it. It
// gets them when a draft is asked for, so a prompt costs nothing but its rows. These lie in memory of the machine, also
// if the model runs on a GPU: a long text has gigabytes of them, of which the head mostly reads the last few once.
class DraftHead {
 public:
  // `head`: of model::Part::draft_head, with a slot for each of the model's.
  DraftHead(std::unique_ptr<Session> head, int64_t n_embd, size_t slots);
  ~DraftHead();

  Session& session() { return *head_; }
  const Session& session() const { return *head_; }
  // Where the hidden rows of these tokens go, which the model is about to compute; false, and nothing, for a sequence
  // that the head does not know. Throws OutOfMemoryError.
  bool make_room(const ops::SequenceRun& run, std::span<float*> rows);
  // They are there.
  void note(const ops::SequenceRun& run, std::span<const int32_t> tokens);
  // They do not come: the room that was made for them is free again.
  void give_back_unused(int32_t slot);
  // Bytes of the rows that sequences hold, in whole blocks.
  size_t row_bytes() const { return blocks_.used_bytes(); }
  // A sequence holds only so many positions now.
  void forget(int32_t slot, int64_t positions);
  void copy(int32_t from, int32_t to, int64_t positions);
  // Whether the head knows the hidden rows of a sequence that holds so many positions.
  bool knows(int32_t slot, int64_t positions) const;
  // Pairs of a sequence that the head has still to read before a draft, but for the one with the token that is about to
  // follow.
  int64_t lacks(int32_t slot) const;
  // Reads up to so many of these now.
  void read(int32_t slot, int64_t count);
  // Of the token behind each text, in one decode. Throws PlanError where the head does not know all that a sequence
  // holds.
  void draft(std::span<const Following> texts, const Drafts& out);
  // The same one token further: `token` is the one that was just drafted for the sequence. Its row of the trunk is not
  // there yet, so the head reads its own last row in its place. The next draft() forgets these pairs.
  void draft_further(std::span<const Following> texts, const Drafts& out);

 private:
  using Block = RowBlocks::Block;  // [kBlockRows, n_embd]; sequences may share it, and none writes to it then
  struct Sequence {
    std::vector<int32_t> tokens;
    std::vector<Block> blocks;   // of the rows of these tokens
    std::vector<int32_t> given;  // the token of each pair that the head holds
    size_t agreeing = 0;         // the first of these, which are the sequence's; a draft does not compare a long text
    Block last;                  // [n_embd], the head's row of its last pair
    bool has_last = false;
  };

  static constexpr size_t kBlockRows = 256;

  // Counts further pairs of a sequence as agreeing, after tokens or pairs have come.
  static void compare(Sequence& s);
  // The head holds pairs of these tokens behind the others.
  static void give(Sequence& s, std::span<const int32_t> tokens);
  float* row(const Sequence& s, size_t token) const {
    return s.blocks[token / kBlockRows].get() + token % kBlockRows * static_cast<size_t>(n_embd_);
  }
  // Feeds pairs of tokens, and the rows beside them, to the head and keeps the last row of each sequence.
  void feed(std::span<const Following> texts, std::span<const std::span<const int32_t>> tokens,
            std::span<const float* const> rows, const Drafts& out);

  std::unique_ptr<Session> head_;
  int64_t n_embd_ = 0;
  RowBlocks blocks_;
  std::vector<Sequence> sequences_;
};

}  // namespace dyno::runtime
