"""Constrained generation by a JSON schema, a grammar or a regular expression, with masks over the next token.

The library llguidance compiles the rules, and gives the tokens that may come next.
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._locks import for_one_call
from dyno._vocabulary import TokenType
from dyno.errors import NotInstalledError, PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dyno._sampling import Sampling
    from dyno.tokenizer import Tokenizer

__all__ = ["Grammar", "check_rules"]

_LONGEST = 1 << 20
"""Characters of rules. Compiled ones take some twenty times as much memory, until their text ends."""
_LAYOUT = {"whitespace_pattern": "[ ]?"}
"""Layout of JSON, unless the schema has its own as `x-guidance`: at most one blank between two parts. If any
blanks were allowed anywhere, a weak model would write only blanks."""
_compiled: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()
_compiling = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where a thread that was compiling no longer exists to release
    it."""
    global _compiling
    _compiling = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Grammar:
    """The rules of one generation, with its current state in them.

    Args:
        sampling: The settings with the rules: `json_schema`, `grammar` or `regex`.
        tokenizer: The tokenizer of the model.

    Raises:
        NotInstalledError: llguidance is not installed.
        PlanError: The rules are wrong, or the vocabulary has no token that ends a text.
    """

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer) -> None:
        llguidance = _library()
        kind = next(k for k in ("json_schema", "grammar", "regex") if getattr(sampling, k) is not None)
        source = _source(llguidance, kind, getattr(sampling, kind))
        self._kind, self._rules = kind, getattr(sampling, kind)
        self._tokenizer = tokenizer  # the library holds only a weak reference
        self._matcher = llguidance.LLMatcher(_tokens(tokenizer), source, log_level=0)
        self._check()
        self._mask = np.zeros((len(tokenizer) + 31) // 32, np.int32)

    def mask(self) -> NDArray[np.int32]:
        """A bit mask over the vocabulary, 32 tokens in a word: the tokens that may come next. Valid until the
        next call.

        Raises:
            PlanError: The rules have become too large for their limits.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by a token that was drawn with the mask."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _unusable(self._kind, self._rules, self._matcher.get_error())


def check_rules(kind: str, rules: str) -> None:
    """Check rules as far as possible without a model.

    Args:
        kind: "json_schema" or "grammar".
        rules: The text of the schema or grammar.

    Raises:
        NotInstalledError: llguidance is not installed.
        PlanError: The rules are wrong.
    """
    llguidance = _library()
    source = _source(llguidance, kind, rules)
    # Without a vocabulary, the library accepts any name of a control token.
    if problem := llguidance.LLMatcher.validate_grammar(source):
        raise _unusable(kind, rules, problem)


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise  # it is installed, but broken
        raise NotInstalledError(
            "schemas and grammars need llguidance, which is missing: pip install 'gguf-dyno[grammar]'"
        ) from error
    return llguidance


def _source(llguidance: Any, kind: str, rules: Any) -> str:
    """The rules in the format of the library.

    Raises:
        PlanError: The rules cannot be read.
    """
    try:
        if kind == "json_schema":
            text = rules if isinstance(rules, str) else json.dumps(rules, ensure_ascii=False)
            _check_length(kind, text)
            schema = json.loads(text)
            if not isinstance(schema, (dict, bool)):
                raise ValueError(f"{text[:80]} is not a JSON schema")
            laid_out = schema is False or (isinstance(schema, dict) and "x-guidance" in schema)
            return str(
                llguidance.LLMatcher.grammar_from_json_schema(
                    "{}" if schema is True else text, defaults=None if laid_out else _LAYOUT
                )
            )
        _check_length(kind, rules)
        if kind == "grammar":
            return str(llguidance.grammar_from("gbnf", rules))
        return str(llguidance.LLMatcher.grammar_from_regex(rules))
    except (ValueError, TypeError) as error:
        raise PlanError(f"[grammar] {kind} cannot be read: {_plain(kind, rules, error)}") from error


def _check_length(kind: str, text: str) -> None:
    if len(text) > _LONGEST:
        raise PlanError(f"[grammar] {kind} has {len(text)} characters; expected at most {_LONGEST}")


def _unusable(kind: str, rules: Any, problem: object) -> PlanError:
    return PlanError(f"[grammar] {kind} cannot be used: {_plain(kind, rules, problem)}")


_STATES = {
    "NoExtensionBias": "no token can come next; expected rules that some text of this vocabulary follows"
}
"""Names of states in which the library stops, by which it begins a message."""
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_IN_EXPRESSION = re.compile(r"(?: \(in regex\): )?regex parse error:.*?\nerror: ", re.DOTALL)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


def _plain(kind: str, rules: Any, problem: object) -> str:
    """A message of the library in one line: without excerpts, drawings, and the names of all control tokens.

    Args:
        kind: Of the rules.
        rules: Their text.
        problem: The message.
    """
    text = str(problem).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
    text = text.partition("<state>")[0].strip()
    text = _STATES.get(text, text)
    text = _EXCERPT.sub("", text).partition("; following special tokens are available")[0]
    text = _IN_EXPRESSION.sub(lambda found: ": " if found.start() else "a regular expression: ", text)
    # The library knows only its own form of an expression, and of a grammar in the syntax of GBNF.
    own = kind == "grammar" and "::=" not in rules
    text = _PLACE.sub(r"line \1, column \2: " if own else "", text, count=1)
    return " ".join(text.split())[:400]


class _Vocabulary:
    """A tokenizer with the interface that the library expects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        hidden = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
        self.eos_token_id = min(tokenizer.end_of_generation)
        self.bos_token_id = vocabulary.bos
        self.special_token_ids = [t for t, kind in enumerate(vocabulary.types) if kind in hidden]
        self.tokens = [
            vocabulary.tokens[t].encode("utf-8", "surrogateescape")
            if kind in hidden
            else tokenizer.piece(t, special=True)
            for t, kind in enumerate(vocabulary.types)
        ]
        # A weak reference, because a value of `_compiled` that holds its key would keep the entry for ever.
        self._tokenizer = weakref.ref(tokenizer)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # each grammar holds a reference to it
        return tokenizer.encode(text, add_special=False)


def _tokens(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.end_of_generation:
        raise PlanError("[grammar] the vocabulary has no token that ends a text, so no text could end")
    with for_one_call(_compiling, "grammar"):  # only once, however many requests start at the same time
        if tokenizer not in _compiled:
            _compiled[tokenizer] = LLTokenizer(
                TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=sorted(tokenizer.end_of_generation)
            )
        return _compiled[tokenizer]
