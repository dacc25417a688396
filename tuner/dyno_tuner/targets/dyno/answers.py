"""The questions that show whether a configuration's answers changed, and the scores of the replies.

A kernel is chosen for a range of batch sizes, so a fault may show at one size alone. The passages are
therefore decoded in batches of about every such size, one `Group` each, and the distance from the exact path
is kept group by group and, within a group, block by block, so that `answer_check.judge` can compare two
configurations in pairs. Settings that no batch of a group gets to feel (`Group.code`) need not be tried on it
again.
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

FEWEST, MOST = 64, 4608  # tokens, where the exact path is slow, and where it is not
SIZES = (1, 3, 7, 14, 30, 60, 125, 250, 500, 1000, 2000, 4000)  # one within each range of batch sizes
BLOCK = 8  # scored tokens whose mean is one observation
THRESHOLDS = frozenset({"matvec_max_tokens", "matvec_id_max_tokens", "mmq_max_tokens", "mmq_id_max_tokens"})
"""Settings that ask whether a pass has more tokens than they say."""
SECONDS, SHARE = 10.0, 1 / 18  # that the exact path takes, about, and of a short budget
ENOUGH = 576  # tokens that give each of the nine sizes up to 512 the blocks to be judged by
_LOGITS_BYTES = 512 << 20  # of the exact path, kept; with large vocabularies fewer tokens are scored


@dataclass(frozen=True, slots=True)
class Group:
    """A passage, decoded in batches of `size` tokens."""

    size: int
    tokens: NDArray[np.int32]
    every: int
    """Every so many tokens of a batch, and its last, are scored."""

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
        """The part of `settings` that decides the code of this group's batches: of the u-batch the sizes of
        the passes that it cuts them into, of a threshold on which side of it they are."""
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
    """Tokens that the exact path has time for.

    Every comparison takes about a third of that time again. On a short budget, the full length would leave
    room for a few configurations only.

    Args:
        rate: Tokens/s of the exact path, about.
        budget: Seconds of the run; None: no limit.
    """
    full = int(rate * SECONDS)
    if budget is None or SHARE * budget >= SECONDS:
        return full
    return min(full, max(ENOUGH, int(rate * SHARE * budget)))


def passages(path: str, count: int, seed: int) -> NDArray[np.int32]:
    """`count` tokens of text from a start that `seed` moves.

    Raises:
        ModelError, UnsupportedError: The file has no vocabulary, or one that is not known here.
    """
    from dyno.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(path)
    tokens = list(tokenizer.encode(TEXT))
    # Code and the prose between it: this package's own.
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
    """The passages to score.

    Args:
        path: GGUF file, for its tokenizer; without a vocabulary random tokens are scored.
        total: Tokens, about.
        ctx: Length of the context; no passage is longer.
        largest: Tokens of the largest batch that is of interest.
        vocabulary: Logits of a token.
        seed: Another one takes other passages.
        once: Tokens of a batch beyond `largest`, where computing it exactly costs little: it runs once.
    """
    # With a large vocabulary fewer tokens, all of them scored, say as much as more of which some are.
    rows = _LOGITS_BYTES // (4 * vocabulary)
    total = min(total, max(FEWEST, rows * 8 // 9 if once else rows))
    sizes = [s for s in SIZES if s <= max(1, min(largest, ctx, total // 2))]
    share = max(1, total // len(sizes))
    lengths = [min(max(1, share // size) * size, ctx - ctx % size) for size in sizes]
    thin = [1] * len(sizes)
    beyond = max((s for s in SIZES if sizes[-1] < s <= min(once, ctx)), default=0)
    if beyond:
        # The work of a large u-batch, for which nothing smaller stands: as many of its rows scored as of the
        # others.
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

    The exact path gives the same for any batch size.
    """
    logits: list[NDArray[np.float32]] = []
    routing: list[NDArray[np.int32] | None] = []
    for group in asked:
        session.reset()
        wanted = group.scored()
        rows, chosen = [], []
        # Where one batch is all there is, rows that are not scored need not be computed either.
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
    """Logits [scored, n_vocab] of a group in its own batches, with the experts given."""
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
    """KL divergence of a group, nats per token, in means over blocks of scored tokens."""
    rows = kld_rows(exact, ours)
    count = max(1, len(rows) // BLOCK)
    blocks = tuple(float(part.mean()) for part in np.array_split(rows, count))
    agree = int((exact.argmax(axis=1) == ours.argmax(axis=1)).sum())
    return GroupQuality(group.name, len(rows), float(rows.mean()), float(np.max(rows)), agree, blocks)
