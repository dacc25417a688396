"""The passages that show whether the answers of a configuration changed, and their scores.

A kernel is chosen for a range of batch sizes, so a fault may show only at one size. Therefore the passages
are decoded in batches of about every such size, one `Group` each. The distance from the exact path is
computed by group and, within a group, by block, so that `answer_check.judge` can compare two configurations
in pairs. If settings affect no batch of a group (`Group.code`), the group is not computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno.errors import ModelError, UnsupportedError
from dyno.quality import kld_rows

from ...core.protocol import GroupQuality
from ..check_text import TEXT

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from numpy.typing import NDArray

FEWEST, MOST = 64, 4608  # tokens: the least with a slow exact path, and the most with a fast one
SIZES = (1, 3, 7, 14, 30, 60, 125, 250, 500, 1000, 2000, 4000)  # one in each range of batch sizes
BLOCK = 8  # number of scored tokens in a block, whose mean is one observation
THRESHOLDS = frozenset({"matvec_max_tokens", "matvec_id_max_tokens", "mmq_max_tokens", "mmq_id_max_tokens"})
"""Settings that are bounds on the number of tokens in a pass."""
SECONDS, SHARE = 10.0, 1 / 18  # approximate seconds of the exact path, and its share of a short budget
ENOUGH = 576  # tokens with which each of the nine sizes up to 512 has enough blocks
_LOGITS_BYTES = 512 << 20  # limit for the logits of the exact path, which limits the scored tokens


@dataclass(frozen=True, slots=True)
class Group:
    """A group: a passage that is decoded in batches of `size` tokens."""

    size: int
    tokens: NDArray[np.int32]
    every: int
    """Distance between scored tokens of a batch. The last one is always scored."""

    @property
    def name(self) -> str:
        return f"batches of {self.size}"

    def batches(self, size: int | None = None) -> Iterator[slice]:
        """The passage in batches of `size` tokens (default: the group's own)."""
        step = size or self.size
        for start in range(0, len(self.tokens), step):
            yield slice(start, min(start + step, len(self.tokens)))

    def scored(self) -> NDArray[np.intp]:
        """Positions in the passage whose logits are compared."""
        found = [
            at
            for part in self.batches()
            for at in range(part.start, part.stop)
            if (at - part.start + 1) % self.every == 0 or at == part.stop - 1
        ]
        return np.asarray(found, dtype=np.intp)

    def code(self, settings: Mapping[str, Any]) -> Hashable:
        """The part of `settings` that determines the code of this group's batches: the sizes of the passes
        into which the u-batch cuts them, and the side of each threshold."""
        ubatch = int(settings["ubatch"])
        passes = (self.size,) if self.size <= ubatch else (ubatch, self.size % ubatch or ubatch)
        felt: list[Hashable] = [passes]
        for name, value in sorted(settings.items()):
            if name in THRESHOLDS:
                felt.append((name, tuple(p <= int(value) for p in passes)))
            elif name != "ubatch":
                felt.append((name, tuple(value) if isinstance(value, list) else value))
        return tuple(felt)


def affordable(rate: float, budget: float | None) -> int:
    """The number of tokens for which the exact path has time.

    Each comparison takes about a third of that time. With a short budget, the full length would leave room
    for only a few configurations.

    Args:
        rate: Approximate tokens/s of the exact path.
        budget: Seconds of the run; None: no limit.
    """
    full = int(rate * SECONDS)
    if budget is None or SHARE * budget >= SECONDS:
        return full
    return min(full, max(ENOUGH, int(rate * SHARE * budget)))


def passages(path: str, count: int, seed: int) -> NDArray[np.int32]:
    """`count` tokens of text, from a start that depends on `seed`.

    Raises:
        ModelError, UnsupportedError: The file has no vocabulary, or an unknown one.
    """
    from dyno.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(path)
    tokens = list(tokenizer.encode(TEXT))
    # Code with prose: the sources of this package.
    for source in sorted(p.name for p in resources.files("dyno").iterdir() if p.name.endswith(".py")):
        if len(tokens) > 2 * count:
            break
        text = resources.files("dyno").joinpath(source).read_text(encoding="utf-8")
        tokens += tokenizer.encode(text, add_special=False)
    start = (seed * 997) % max(1, len(tokens) - count)
    return np.resize(np.asarray(tokens[start:], dtype=np.int32), count)


def groups(
    path: str, *, total: int, ctx: int, largest: int, vocabulary: int, seed: int = 0, once: int = 0
) -> list[Group]:
    """The groups to score.

    Args:
        path: GGUF file, for its tokenizer. Without a vocabulary, random tokens are scored.
        total: Approximate number of tokens.
        ctx: Context length, which limits a passage.
        largest: Largest batch of interest, in tokens.
        vocabulary: Number of logits of a token.
        seed: Seed of the choice of passages.
        once: Size of one additional batch beyond `largest`, if its exact computation is cheap.
    """
    # With a large vocabulary, fewer tokens that are all scored are as good as more that are partly scored.
    rows = _LOGITS_BYTES // (4 * vocabulary)
    total = min(total, max(FEWEST, rows * 8 // 9 if once else rows))
    sizes = [s for s in SIZES if s <= max(1, min(largest, ctx, total // 2))]
    share = max(1, total // len(sizes))
    lengths = [min(max(1, share // size) * size, ctx - ctx % size) for size in sizes]
    thin = [1] * len(sizes)
    beyond = max((s for s in SIZES if sizes[-1] < s <= min(once, ctx)), default=0)
    if beyond:
        # A large u-batch, which no smaller one can replace. As many of its rows are scored as of the others.
        sizes.append(beyond)
        lengths.append(beyond)
        thin.append(max(1, beyond // share))
    try:
        tokens = passages(path, sum(lengths), seed)
    except (ModelError, UnsupportedError):
        rng = np.random.default_rng([seed, vocabulary])
        tokens = rng.integers(vocabulary, size=sum(lengths), dtype=np.int32)
    scored = sum(length // every for length, every in zip(lengths, thin, strict=True))
    fewer = max(1, -(-scored * vocabulary * 4 // _LOGITS_BYTES))
    starts = np.cumsum([0, *lengths])
    return [
        Group(size, tokens[start : start + length], min(fewer * every, size))
        for size, start, length, every in zip(sizes, starts, lengths, thin, strict=False)
    ]


def exact_answers(
    session: Any, asked: list[Group], *, capture: bool
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.int32] | None]]:
    """Logits [scored, n_vocab] and experts [MoE layers, tokens, used] of each group, in large batches.

    The exact path gives the same result for any batch size.
    """
    logits: list[NDArray[np.float32]] = []
    routing: list[NDArray[np.int32] | None] = []
    for group in asked:
        session.reset()
        wanted = group.scored()
        rows, chosen = [], []
        # With a single batch, rows that are not scored need not be computed.
        every = group.every if len(group.tokens) == group.size else 1
        for part in group.batches(max(1, 256 // every) * every):
            found, used = session.decode(
                [(0, group.tokens[part])], rows="all", capture_routing=capture, every=every
            )
            inside = wanted[(wanted >= part.start) & (wanted < part.stop)] - part.start
            rows.append(found if every > 1 else found[inside])
            chosen.append(used)
        logits.append(np.concatenate(rows))
        routing.append(np.concatenate(chosen, axis=1) if capture else None)
    return logits, routing


def answer(session: Any, group: Group, pinned: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """Logits [scored, n_vocab] of a group in its own batches, with given experts."""
    session.reset()
    rows = []
    for part in group.batches():
        experts = None if pinned is None else np.ascontiguousarray(pinned[:, part])
        found, _ = session.decode(
            [(0, group.tokens[part])], rows="all", pinned_routing=experts, every=group.every
        )
        rows.append(found)
    return np.concatenate(rows)


def score(group: Group, exact: NDArray[np.float32], ours: NDArray[np.float32]) -> GroupQuality:
    """The KL divergence of a group in nats per token, as means over blocks of scored tokens."""
    rows = kld_rows(exact, ours)
    count = max(1, len(rows) // BLOCK)
    blocks = tuple(float(part.mean()) for part in np.array_split(rows, count))
    agree = int((exact.argmax(axis=1) == ours.argmax(axis=1)).sum())
    return GroupQuality(group.name, len(rows), float(rows.mean()), float(np.max(rows)), agree, blocks)
