"""Sampling: the checked settings of a draw, and the draw from logits on the host."""

from __future__ import annotations

import numbers
import os
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import WeakKeyDictionary

import numpy as np

from dyno._locks import for_one_call
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from dyno._grammar import Grammar
    from dyno.tokenizer import Tokenizer

__all__ = ["BOUNDS", "Bound", "DrawOptions", "HostSampler", "Sampling", "TokenLogprobs", "uniforms"]

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_BREAKERS = ("\n", ":", '"', "*")
_MOST_BREAKERS = 32
"""Most breakers of a request. Each one is searched for in all tokens of the vocabulary."""
_KEPT_BREAKERS = 16
"""Number of lists of breakers whose tokens are cached. Clients of a server choose the lists."""


class DrawOptions(TypedDict, total=False):
    """The further sampling settings by name, as `Sampling` describes them."""

    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: Sequence[str]
    logit_bias: Mapping[int, float]
    json_schema: Mapping[str, Any] | str | None
    grammar: str | None
    regex: str | None


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing a token from logits. With `temperature` 0, the most probable token is taken.

    The settings from `typical_p` on need the logits on the host, which costs time for each token on a GPU.
    """

    temperature: float = 0.0
    top_k: int = 40
    """Only the k most probable tokens; 0 or -1 = all."""
    top_p: float = 0.95
    """Only the most probable tokens that together reach this probability; 1 = all, 0 = the first one."""
    min_p: float = 0.05
    """Only tokens at least this probable relative to the best; 0 = all."""
    seed: int | None = None
    """Seed of the random numbers; None: a random seed of the system."""
    typical_p: float = 1.0
    """Only the tokens whose information content is nearest to the entropy, up to this probability mass; 1 =
    all."""
    xtc_probability: float = 0.0
    """Probability of excluding the most probable tokens, so that a rarer one is drawn (XTC); 0 = never."""
    xtc_threshold: float = 0.1
    """XTC excludes all tokens at least this probable, except the least probable of them."""
    repeat_penalty: float = 1.0
    """Divides the positive logits of recent tokens, and multiplies their negative ones; 1 = off."""
    repeat_last_n: int = 64
    """Number of recent tokens of prompt and text that `repeat_penalty` and DRY consider; -1 = all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the text, without the prompt."""
    frequency_penalty: float = 0.0
    """Subtracted from those logits once for each occurrence in the text."""
    dry_multiplier: float = 0.0
    """Penalty for a token that would continue a repeated sequence (DRY); 0 = off."""
    dry_base: float = 1.75
    """Factor by which the DRY penalty grows with each token of the sequence."""
    dry_allowed_length: int = 2
    """Longest repeated sequence in tokens without a DRY penalty."""
    dry_sequence_breakers: Sequence[str] = _BREAKERS
    """A token that contains one of these strings ends a repeated sequence."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Values to add to logits, by token id; minus infinity forbids a token."""
    json_schema: Mapping[str, Any] | str | None = None
    """A JSON schema that the text follows; `{}`: any JSON."""
    grammar: str | None = None
    """A grammar that the text follows, in the syntax of GBNF or Lark."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    rules_after: str = ""
    """The schema, grammar or expression applies only after this text has appeared. Before that, all tokens
    are allowed."""
    logprobs: int | None = None
    """Report the log-probability of each drawn token, and of this many most probable tokens; None = report
    none."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise PlanError(f"[sample] {name} must be a number, not {value!r}")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise PlanError(f"[sample] {name} must be a whole number, not {value!r}")
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not bound.holds(value):
                raise PlanError(f"[sample] {name} must be {bound.words}, not {value!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise PlanError(f"[sample] logit_bias must be numbers by token id, not {self.logit_bias!r:.80}")
        for token, value in self.logit_bias.items():
            if not isinstance(token, int) or not 0 <= token <= _LARGEST_COUNT:
                raise PlanError(
                    f"[sample] logit_bias names token {token!r:.80}; expected a token id, 0 or more"
                )
            if not isinstance(value, numbers.Real) or not value < float("inf"):
                raise PlanError(
                    f"[sample] logit_bias of token {token} is {value!r:.80}; expected a number below infinity"
                )
        breakers = self.dry_sequence_breakers
        if isinstance(breakers, str) or not all(isinstance(b, str) for b in breakers):
            raise PlanError(f"[sample] dry_sequence_breakers must be a list of strings, not {breakers!r:.80}")
        if not all(breakers):
            raise PlanError("[sample] dry_sequence_breakers has an empty string; leave it out")
        if len(breakers) > _MOST_BREAKERS:
            raise PlanError(
                f"[sample] dry_sequence_breakers has {len(breakers)} strings; "
                f"expected at most {_MOST_BREAKERS}"
            )

        rules = [name for name in _RULES if getattr(self, name) is not None]
        if len(rules) > 1:
            raise PlanError(f"[sample] {' and '.join(rules)} cannot both hold; give one of them")
        for name in ("grammar", "regex"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise PlanError(f"[sample] {name} must be text, not {getattr(self, name)!r}")
        if not isinstance(self.json_schema, (Mapping, str, type(None))):
            raise PlanError(
                f"[sample] json_schema must be an object or JSON text, not {self.json_schema!r:.80}"
            )

    @property
    def has_rules(self) -> bool:
        """Whether the text must follow a schema, a grammar or an expression."""
        return any(getattr(self, name) is not None for name in _RULES)

    @property
    def needs_vocabulary(self) -> bool:
        """Whether a setting depends on the texts of tokens."""
        return self.has_rules or bool(self.rules_after) or self.dry_multiplier > 0

    @property
    def needs_logits(self) -> bool:
        """Whether a setting needs the logits on the host, so that the device cannot draw."""
        neutral = Sampling()
        return any(getattr(self, name) != getattr(neutral, name) for name in _ON_HOST)

    def random(self) -> np.random.Generator:
        """A random generator for this seed. The same seed draws the same tokens."""
        return np.random.default_rng(secrets.randbits(64) if self.seed is None else self.seed)

    def sampler(self, random: np.random.Generator | None = None) -> Callable[[NDArray[np.float32]], int]:
        """A function from logits [n_vocab] to a token id, with its own random numbers if none are given.

        It applies temperature, top_k, top_p and min_p. `HostSampler` applies all settings.
        """
        from dyno import _core

        source = self.random() if random is None else random

        def draw(logits: NDArray[np.float32]) -> int:
            uniform = float(uniforms(source, 1)[0])
            return int(_core.sample(logits, *self.for_engine(), uniform))

        return draw

    def for_engine(self) -> tuple[float, int, float, float]:
        """Temperature, top_k, top_p and min_p in the form that the engine takes."""
        kept, reached = _counted(max(self.top_k, 0)), float(self.top_p) or _LEAST
        return float(self.temperature), kept, reached, float(self.min_p)


def _counted(count: int) -> int:
    """A number of tokens, limited to the largest one that the engine takes. No model has that many tokens."""
    return min(int(count), _LARGEST_COUNT)


_LARGEST = float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).tiny)
_LARGEST_COUNT = 2**31 - 1
_COUNTS = ("top_k", "repeat_last_n", "dry_allowed_length")
_INTEGERS = (*_COUNTS, "seed", "logprobs")
_ANY = float("inf")


@dataclass(frozen=True)
class Bound:
    """The allowed range of a sampling setting, in Python and in requests of the server."""

    least: float
    most: float
    words: str
    """The range in words, for messages."""
    above: bool = False
    """Whether `least` itself is excluded."""

    def holds(self, value: float) -> bool:
        """Whether `value` is in the range."""
        return (value > self.least if self.above else value >= self.least) and value <= self.most


BOUNDS = {
    "temperature": Bound(0, _LARGEST, "at least 0"),
    "top_k": Bound(-1, _ANY, "at least -1 (0 or -1: all tokens)"),
    "top_p": Bound(0, 1, "in [0, 1]"),
    "min_p": Bound(0, 1, "in [0, 1]"),
    "seed": Bound(0, _ANY, "at least 0"),
    "typical_p": Bound(0, 1, "in (0, 1]", above=True),
    "xtc_probability": Bound(0, 1, "in [0, 1]"),
    "xtc_threshold": Bound(0, 1, "in [0, 1]"),
    "repeat_penalty": Bound(0, _LARGEST, "above 0 (1: off)", above=True),
    "repeat_last_n": Bound(-1, _ANY, "at least -1 (-1: all tokens)"),
    "presence_penalty": Bound(-_LARGEST, _LARGEST, "a finite number"),
    "frequency_penalty": Bound(-_LARGEST, _LARGEST, "a finite number"),
    "dry_multiplier": Bound(0, _LARGEST, "at least 0 (0: off)"),
    "dry_base": Bound(1, _LARGEST, "at least 1"),
    "dry_allowed_length": Bound(0, _ANY, "at least 0"),
    "logprobs": Bound(0, _ANY, "at least 0, or None"),
}
"""The ranges of the numeric settings, by name."""
_NUMBERS = tuple(name for name in BOUNDS if name not in _INTEGERS)
_RULES = ("json_schema", "grammar", "regex")
_ON_HOST = {
    *("typical_p", "xtc_probability", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "logit_bias", "logprobs"),
    *_RULES,
}


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a drawn token under the model itself, before any sampling setting."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and their log-probabilities, in descending order."""


class HostSampler:
    """The sampler of one generation, which draws tokens from logits on the host with all settings.

    Args:
        sampling: The settings.
        tokenizer: The tokenizer, for the texts of tokens; may be None if no setting needs it.
        n_vocab: Length of the logits.
        prompt: Tokens before the first draw.
    """

    def __init__(
        self, sampling: Sampling, tokenizer: Tokenizer | None, n_vocab: int, prompt: Sequence[int]
    ) -> None:
        from dyno import _core

        settings = {
            **{name: float(getattr(sampling, name)) for name in _NUMBERS},
            **{name: _counted(getattr(sampling, name)) for name in _COUNTS},
            **dict(zip(("top_k", "top_p"), sampling.for_engine()[1:3], strict=True)),
            "logit_bias": [(token, float(value)) for token, value in sampling.logit_bias.items()],
        }
        if sampling.dry_multiplier > 0:
            assert tokenizer is not None  # see needs_vocabulary, as below
            settings["dry_breakers"] = _holding(tokenizer, tuple(sampling.dry_sequence_breakers), n_vocab)
        self._sampler: Any = _core.Sampler(settings, n_vocab)
        self._sampler.begin(np.asarray(prompt, np.int32))
        self._random = sampling.random()
        self._two = sampling.xtc_probability > 0
        self._top = None if sampling.logprobs is None else _counted(sampling.logprobs)
        self._grammar: Grammar | None = None
        self._tokenizer, self._waits_for = tokenizer, sampling.rules_after.encode()
        self._seen = b""  # the end of the text, until the rules apply
        if self._waits_for:
            # The first piece computes all pieces. In `draw`, that would wait for the lock of Python 3.11's
            # cached_property.
            assert tokenizer is not None
            tokenizer.piece(0)
        if sampling.has_rules:
            from dyno._grammar import Grammar

            assert tokenizer is not None
            self._grammar = Grammar(sampling, tokenizer)
        self.logprobs: TokenLogprobs | None = None
        """The log-probabilities of the last draw, if the settings request them."""

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token."""
        from dyno import _core

        random = uniforms(self._random, 2 if self._two else 1)
        second = float(random[1]) if self._two else 0.0
        rules = None if self._waits_for else self._grammar
        mask = None if rules is None else rules.mask()
        token = int(self._sampler.draw(logits, float(random[0]), second, mask))
        if rules is not None:
            rules.accept(token)
        elif self._waits_for:
            assert self._tokenizer is not None
            seen = self._seen + self._tokenizer.piece(token, special=True)
            if self._waits_for in seen:
                self._waits_for = seen = b""
            self._seen = seen[-len(self._waits_for) :]  # reasoning may be long
        if self._top is not None:
            (_, logprob), *top = _core.logprobs(logits, token, self._top)
            self.logprobs = TokenLogprobs(token, logprob, tuple(top))
        return token


_searching = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where a thread that was searching no longer exists to release
    it."""
    global _searching
    _searching = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
_breakers: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], list[int]]] = WeakKeyDictionary()


def _holding(tokenizer: Tokenizer, words: tuple[str, ...], n_vocab: int) -> list[int]:
    """The tokens whose text contains one of `words`. The last lists are cached, because a search goes through
    the whole vocabulary.
    """
    with for_one_call(_searching, "sampler"):  # if two threads want the same list, it is made only once
        known = _breakers.setdefault(tokenizer, {})
        found = known.pop(words, None)
        if found is None:
            # One regular expression is much faster than a search for each word.
            any_of = re.compile(b"|".join(re.escape(word.encode()) for word in words))
            pieces = enumerate(map(tokenizer.piece, range(len(tokenizer)))) if words else ()
            found = [t for t, piece in pieces if any_of.search(piece)]
        known[words] = found
        for oldest in list(known)[:-_KEPT_BREAKERS]:
            del known[oldest]
    return [t for t in found if t < n_vocab]


def uniforms(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Random numbers in [0, 1) for `count` draws. They do not depend on the number that is requested at
    once."""
    # A number just below 1 would be rounded to 1 in float32.
    return np.minimum(random.random(count).astype(np.float32), _BELOW_ONE)
