// The head that predicts one token further (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2): a session of its own over
// one block, which reads a token's embedding beside the hidden row of the token before it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/args.h"

namespace dyno::runtime {

class Session;

// Tokens of a draft at most (setting spec_max), for which the head's cache has room beside what the model's holds.
inline constexpr int64_t kMostDraft = 64;

// A token that is about to follow a sequence.
struct Following {
  int32_t slot = 0;
  int32_t token = 0;
  int64_t positions = 0;  // that the sequence holds
};

// Pair t of a sequence is the hidden row of its token t and its token t + 1; the head attends to the pairs up to it. It
// gets them when a draft is asked for, so a prompt costs nothing but its rows.
class DraftHead {
 public:
  // `head`: of model::Part::draft_head, with a slot for each of the model's.
  DraftHead(std::unique_ptr<Session> head, int64_t n_embd, size_t slots);
  ~DraftHead();

  Session& session() { return *head_; }
  // Hidden rows [run.n_tokens, n_embd] of these tokens, which the model has computed.
  void note(const ops::SequenceRun& run, std::span<const int32_t> tokens, const float* rows);
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
  // Logits [texts, n_vocab] of the token behind each, in one decode. Throws PlanError where the head does not know all
  // that a sequence holds.
  void draft(std::span<const Following> texts, float* logits);
  // The same one token further: `token` is the one that was just drafted for the sequence. Its row of the trunk is not
  // there yet, so the head reads its own last row in its place. The next draft() forgets these pairs.
  void draft_further(std::span<const Following> texts, float* logits);

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    std::vector<float> rows;     // [tokens, n_embd]
    std::vector<int32_t> given;  // the token of each pair that the head holds
    std::vector<float> last;     // [n_embd], the head's row of its last pair
  };

  // Pairs that the head holds and that are the sequence's.
  static size_t agreeing(const Sequence& s);
  // Feeds pairs of tokens, and the rows beside them, to the head and keeps the last row of each sequence.
  void feed(std::span<const Following> texts, std::span<const std::span<const int32_t>> tokens,
            std::span<const float> rows, float* logits);

  std::unique_ptr<Session> head_;
  int64_t n_embd_ = 0;
  std::vector<Sequence> sequences_;
};

}  // namespace dyno::runtime
