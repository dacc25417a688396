"""How a token is drawn: the settings, checked, and the draw from logits on the host."""

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
"""Each of them is looked for in all tokens of a vocabulary."""
_KEPT_BREAKERS = 16
"""Lists of breakers whose tokens are kept: a server's clients choose the lists."""


class DrawOptions(TypedDict, total=False):
    """Further settings of a draw, by name, as `Sampling` describes them."""

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
    """The settings by which a token is drawn from the logits. `temperature` 0 takes the most probable one.

    The settings from `typical_p` on need the logits on the host: on a GPU that costs time for each token.
    """

    temperature: float = 0.0
    top_k: int = 40
    """Only the k most probable tokens; 0 or -1 = all."""
    top_p: float = 0.95
    """Only the most probable tokens that together reach this probability; 1 = all, 0 = the first one."""
    min_p: float = 0.05
    """Only tokens at least this probable relative to the best; 0 = all."""
    seed: int | None = None
    """None draws one from the system."""
    typical_p: float = 1.0
    """Only the tokens whose surprise is nearest to the mean, up to this probability; 1 = all."""
    xtc_probability: float = 0.0
    """How often the most probable tokens are left out, so that a rarer one is drawn; 0 = never."""
    xtc_threshold: float = 0.1
    """These are the tokens at least this probable, but for the least probable of them."""
    repeat_penalty: float = 1.0
    """Divides positive logits of recent tokens and multiplies negative ones; 1 = off."""
    repeat_last_n: int = 64
    """Tokens of prompt and text that `repeat_penalty` and DRY look back on; -1 = all."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the text, without the prompt, has."""
    frequency_penalty: float = 0.0
    """Taken from them once for each time that the text has them."""
    dry_multiplier: float = 0.0
    """Penalty of a token that would continue a sequence that was there before; 0 = off."""
    dry_base: float = 1.75
    """Factor by which that penalty grows with each token of the sequence."""
    dry_allowed_length: int = 2
    """Tokens of such a sequence that cost nothing yet."""
    dry_sequence_breakers: Sequence[str] = _BREAKERS
    """No sequence goes on across a token that holds one of these."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits, by token; minus infinity forbids a token."""
    json_schema: Mapping[str, Any] | str | None = None
    """The text is JSON that this schema describes; `{}` is any JSON."""
    grammar: str | None = None
    """The text follows this grammar, in the syntax of GBNF or Lark."""
    regex: str | None = None
    """The text matches this regular expression as a whole."""
    rules_after: str = ""
    """The three above begin after this text; until then every token may be drawn."""
    logprobs: int | None = None
    """Report log-probabilities: of each drawn token and of this many of the most probable ones."""

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
        if not isinstance(self.logit_bias, Mapping) or not all(
            isinstance(token, int)
            and 0 <= token <= _LARGEST_COUNT
            and isinstance(value, numbers.Real)
            and value < float("inf")
            for token, value in self.logit_bias.items()
        ):
            raise PlanError(f"[sample] logit_bias must be numbers by token id, not {self.logit_bias!r:.80}")
        breakers = self.dry_sequence_breakers
        if isinstance(breakers, str) or not all(isinstance(b, str) and b for b in breakers):
            raise PlanError(f"[sample] dry_sequence_breakers must be a list of strings, not {breakers!r:.80}")
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
        """Whether the text has to follow a schema, a grammar or an expression."""
        return any(getattr(self, name) is not None for name in _RULES)

    @property
    def needs_logits(self) -> bool:
        """Whether a setting needs the logits on the host, so that no device can draw."""
        neutral = Sampling()
        return any(getattr(self, name) != getattr(neutral, name) for name in _ON_HOST)

    def random(self) -> np.random.Generator:
        """Where the random numbers come from: the same seed draws the same tokens."""
        return np.random.default_rng(secrets.randbits(64) if self.seed is None else self.seed)

    def sampler(self, random: np.random.Generator | None = None) -> Callable[[NDArray[np.float32]], int]:
        """A function from logits [n_vocab] to a token id, with its own random numbers if none are given.

        It takes temperature, top_k, top_p and min_p into account; `HostSampler` everything.
        """
        from dyno import _core

        source = self.random() if random is None else random

        def draw(logits: NDArray[np.float32]) -> int:
            uniform = float(uniforms(source, 1)[0])
            return int(_core.sample(logits, *self.for_engine(), uniform))

        return draw

    def for_engine(self) -> tuple[float, int, float, float]:
        """Temperature, top_k, top_p and min_p, as numbers that the engine takes."""
        kept, reached = _counted(max(self.top_k, 0)), float(self.top_p) or _LEAST
        return float(self.temperature), kept, reached, float(self.min_p)


def _counted(count: int) -> int:
    """A number of tokens for the engine. A larger one than it takes means the same: no model has so many."""
    return min(int(count), _LARGEST_COUNT)


_LARGEST = float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).tiny)
_LARGEST_COUNT = 2**31 - 1
_COUNTS = ("top_k", "repeat_last_n", "dry_allowed_length")
_INTEGERS = (*_COUNTS, "seed", "logprobs")
_ANY = float("inf")


@dataclass(frozen=True)
class Bound:
    """The values that a setting of a draw may have, in Python and in a request of the server."""

    least: float
    most: float
    words: str
    """The same, for messages."""
    above: bool = False
    """Whether `least` itself is no such value."""

    def holds(self, value: float) -> bool:
        """Whether `value` is one of them."""
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
"""The bounds of the settings that are numbers."""
_NUMBERS = tuple(name for name in BOUNDS if name not in _INTEGERS)
_RULES = ("json_schema", "grammar", "regex")
_ON_HOST = {
    *("typical_p", "xtc_probability", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "logit_bias", "logprobs"),
    *_RULES,
}


@dataclass(frozen=True)
class TokenLogprobs:
    """The probability of a drawn token under the model itself, before any setting."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and their log-probabilities, in descending order."""


class HostSampler:
    """The sampler of one generation: it draws tokens from logits on the host, with every setting.

    Args:
        sampling: The settings.
        tokenizer: Says which tokens hold a sequence breaker.
        n_vocab: Length of the logits.
        prompt: Tokens before the first draw.
    """

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer, n_vocab: int, prompt: Sequence[int]) -> None:
        from dyno import _core

        settings = {
            **{name: float(getattr(sampling, name)) for name in _NUMBERS},
            **{name: _counted(getattr(sampling, name)) for name in _COUNTS},
            **dict(zip(("top_k", "top_p"), sampling.for_engine()[1:3], strict=True)),
            "logit_bias": [(token, float(value)) for token, value in sampling.logit_bias.items()],
        }
        if sampling.dry_multiplier > 0:
            settings["dry_breakers"] = _holding(tokenizer, tuple(sampling.dry_sequence_breakers), n_vocab)
        self._sampler: Any = _core.Sampler(settings, n_vocab)
        self._sampler.begin(np.asarray(prompt, np.int32))
        self._random = sampling.random()
        self._two = sampling.xtc_probability > 0
        self._top = None if sampling.logprobs is None else _counted(sampling.logprobs)
        self._grammar: Grammar | None = None
        self._tokenizer, self._waits_for = tokenizer, sampling.rules_after.encode()
        self._seen = b""  # the end of the text, while the rules have not begun
        if self._waits_for:
            # The first piece makes all. `draw` would wait for the lock that Python 3.11 has for that.
            tokenizer.piece(0)
        if sampling.has_rules:
            from dyno._grammar import Grammar

            self._grammar = Grammar(sampling, tokenizer)
        self.logprobs: TokenLogprobs | None = None
        """Of the last draw, if the settings ask for it."""

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
    """In a forked child: a thread that was searching is not here to release the lock."""
    global _searching
    _searching = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
_breakers: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], list[int]]] = WeakKeyDictionary()


def _holding(tokenizer: Tokenizer, words: tuple[str, ...], n_vocab: int) -> list[int]:
    """Tokens whose text holds one of `words`. The lists that were used last are kept, because the whole
    vocabulary is searched for them.
    """
    with for_one_call(_searching, "sampler"):  # two threads that want the same list make it once
        known = _breakers.setdefault(tokenizer, {})
        found = known.pop(words, None)
        if found is None:
            # One expression is much faster than a search for each word.
            any_of = re.compile(b"|".join(re.escape(word.encode()) for word in words))
            pieces = enumerate(map(tokenizer.piece, range(len(tokenizer)))) if words else ()
            found = [t for t, piece in pieces if any_of.search(piece)]
        known[words] = found
        for oldest in list(known)[:-_KEPT_BREAKERS]:
            del known[oldest]
    return [t for t in found if t < n_vocab]


def uniforms(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Numbers in [0, 1) for as many draws; they do not depend on how many are asked for at once."""
    # A number just below 1 would become 1 as a float32.
    return np.minimum(random.random(count).astype(np.float32), _BELOW_ONE)
