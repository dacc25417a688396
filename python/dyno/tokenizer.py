"""Conversion of text to tokens and back, from the metadata of a GGUF file only.

The Hugging Face `tokenizers` library encodes text. This module configures it from the vocabulary of the file.
Decoding uses a table of the bytes of each token, so it is exact for any sequence of tokens, even if it ends
within a character. Text is not normalised (no NFC, no trimming), so decoding returns the encoded text.
"""

from __future__ import annotations

import codecs
import operator
import os
import re
import threading
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from dyno import _vocabulary
from dyno._locks import for_one_call, is_mine
from dyno._model_path import model_path
from dyno._vocabulary import TokenType, Vocabulary
from dyno.errors import ModelError, PlanError

__all__ = ["TextStream", "Tokenizer"]

_SPM_SPACE = "▁"
_LONG = 4096
"""Least length of a text in characters for which other Python threads can run during encoding."""
_forked = False
"""Whether this process was forked, so that it lacks the library threads of its parent."""


class Tokenizer:
    """The tokenizer of a model, which encodes and decodes text with its vocabulary.

    The tables are built on first use, so that opening a file stays fast.

    Example:
        >>> tokenizer = Tokenizer.from_gguf("model.gguf")  # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("def main():"))  # doctest: +SKIP
        'def main():'
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.RLock()
        _tokenizers.add(self)

    @classmethod
    def from_metadata(cls, metadata: _vocabulary.Metadata) -> Tokenizer:
        """A tokenizer from anything with `get(key)`: an open GGUF file or a dict.

        Raises:
            ModelError: The file has no vocabulary, or its parts contradict each other.
            UnsupportedError: The tokenizer or pre-tokenizer is unknown. The message has its name.
        """
        return cls(_vocabulary.read(metadata))

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """A tokenizer from the GGUF file at `path`.

        Raises:
            GgufError: The file is not valid GGUF.
            ModelError, UnsupportedError: As in `from_metadata`.
        """
        from dyno import _core

        return cls.from_metadata(_core.Gguf(model_path(path)))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Vocabulary]]:
        return type(self), (self.vocabulary,)

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text; None if the model has none."""
        return self.vocabulary.bos

    @property
    def eos(self) -> int | None:
        """Id of the token that ends a text; None if the model has none."""
        return self.vocabulary.eos

    @property
    def end_of_generation(self) -> frozenset[int]:
        """Ids of tokens that end a generation (end of text, of turn, of message)."""
        return self.vocabulary.end_of_generation

    def __len__(self) -> int:
        return len(self.vocabulary.tokens)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of `text`.

        Args:
            text: Any Unicode text.
            add_special: Whether to put BOS before and EOS after the text, if the model wants them.
            parse_special: Read the names of control tokens (`<|im_start|>`) in the text as these tokens.
            Off, they
                are plain text; keep it off for text that you did not write.

        Raises:
            PlanError: `text` is no string, holds a lone surrogate (which has no UTF-8 form), or the
            vocabulary has no token for some byte of it; or the handler of a signal asks in the middle of
            another call.
        """
        if not isinstance(text, str):
            raise PlanError(f"[tokenizer] text must be a string, not {text!r}")
        self._check_coverage(text)
        with for_one_call(self._lock, "tokenizer"):  # the flag is part of the shared object
            self._hf.encode_special_tokens = not parse_special
            ids = self._ids(text)
        vocabulary = self.vocabulary
        if add_special and vocabulary.add_bos and vocabulary.bos is not None:
            ids.insert(0, vocabulary.bos)
        if add_special and vocabulary.add_eos and vocabulary.eos is not None:
            ids.append(vocabulary.eos)
        return ids

    def _ids(self, text: str) -> list[int]:
        """Encode `text` with the library.

        Its call for several texts lets other Python threads run, but may use worker threads that a forked
        child lacks. Its call for one text does neither.
        """
        if len(text) < _LONG or _forked:
            ids: list[int] = self._hf.encode(text, add_special_tokens=False).ids
            return ids
        (found,) = self._hf.encode_batch_fast([text], add_special_tokens=False)
        ids = found.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`, computed from the length of the longest token,
        without encoding."""
        if self._uncovered and self.vocabulary.unknown is not None:
            return min(len(text), 1)  # one unknown token can stand for any number of characters
        return -(-len(text) // self._longest)

    @cached_property
    def _longest(self) -> int:
        return max((len(t.encode(errors="surrogateescape")) for t in self.vocabulary.tokens), default=1) or 1

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Text of `tokens`. Bytes that are not UTF-8 become U+FFFD.

        Args:
            tokens: Token ids.
            special: Also spell out control tokens.

        Raises:
            PlanError: `tokens` is text, bytes or no iterable, or an item of it is no token of the vocabulary.
        """
        ids = _token_ids(tokens)
        text = b"".join(self.piece(t, special=special) for t in ids)
        if self.vocabulary.add_space_prefix and text.startswith(b" ") and self._starts_plain(ids):
            text = text[1:]
        return text.decode("utf-8", errors="replace")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token, which may be only a part of a character.

        Raises:
            PlanError: `token` is not a whole number, or outside the vocabulary.
        """
        token = _token_id(token)
        if not 0 <= token < len(self._pieces):
            raise PlanError(
                f"[tokenizer] token {token} is outside the vocabulary; expected 0 to {len(self._pieces) - 1}"
            )
        if not special and self.vocabulary.types[token] in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b""
        return self._pieces[token]

    def stream(self, *, special: bool = False) -> TextStream:
        """An incremental decoder, which takes tokens one by one and never returns part of a character."""
        return TextStream(self, special=special)

    def _starts_plain(self, ids: list[int]) -> bool:
        """Whether the text begins with a token that got a blank in front, so not with a user-defined
        token."""
        hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
        first = next((t for t in ids if self.vocabulary.types[t] not in hidden), None)
        return first is not None and self.vocabulary.types[first] != TokenType.USER_DEFINED

    @cached_property
    def _pieces(self) -> list[bytes]:
        to_bytes = _bpe_bytes if self.vocabulary.bytes_are_symbols else _spm_bytes
        pieces = []
        for text, kind in zip(self.vocabulary.tokens, self.vocabulary.types, strict=True):
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
                pieces.append(text.encode("utf-8", errors="surrogateescape"))
            elif kind == TokenType.UNUSED:
                pieces.append(b"")
            else:
                pieces.append(to_bytes(text, kind))
        return pieces

    @cached_property
    def _hf(self) -> Any:
        from dyno import _hf_tokenizer

        return _hf_tokenizer.build(self.vocabulary)

    def _after_fork(self) -> None:
        """Replace locked parts in a forked child, where a thread that was encoding no longer exists to
        release the lock."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        self.__dict__.pop("_hf", None)  # the library would count that thread as a reader for ever

    @property
    def in_call(self) -> bool:
        """Whether the caller is a signal handler that interrupted `encode`."""
        return is_mine(self._lock)

    @cached_property
    def _uncovered(self) -> frozenset[int]:
        """Bytes that no token can represent."""
        vocabulary = self.vocabulary
        known = set(vocabulary.tokens)
        if vocabulary.bytes_are_symbols:
            return frozenset(b for b, symbol in _byte_symbols().items() if symbol not in known)
        return frozenset(b for b in range(256) if f"<0x{b:02X}>" not in known)

    def _check_coverage(self, text: str) -> None:
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = text[error.start]
            # Python reads a wrong byte of a command line as half a pair with this number.
            problem = f"the byte 0x{ord(half) - 0xDC00:02x} is not UTF-8; convert the text with iconv"
            if not "\udc80" <= half <= "\udcff":
                problem = f"{half!r} is half a pair"
            raise PlanError(f"[tokenizer] invalid Unicode at position {error.start}: {problem}") from error
        missing = self._uncovered
        if not missing:
            return
        if self.vocabulary.bytes_are_symbols:
            lost = [byte for byte in missing if byte in raw]
            if lost:
                raise PlanError(f"[tokenizer] the vocabulary has no token for byte 0x{min(lost):02X}")
        elif self.vocabulary.unknown is None:
            # Without an unknown token, a character must be a token itself or consist of byte tokens.
            known = self._single_characters
            for character in text.replace(" ", _SPM_SPACE):
                if character not in known and not missing.isdisjoint(character.encode()):
                    raise PlanError(f"[tokenizer] the vocabulary has no token for {character!r}")

    @cached_property
    def _single_characters(self) -> frozenset[str]:
        return frozenset(t for t in self.vocabulary.tokens if len(t) == 1)


_tokenizers: weakref.WeakSet[Tokenizer] = weakref.WeakSet()


def _renew_locks() -> None:
    global _forked
    _forked = True
    for tokenizer in _tokenizers:
        tokenizer._after_fork()


os.register_at_fork(after_in_child=_renew_locks)


class TextStream:
    """An incremental decoder, which returns characters when they are complete.

    Args:
        tokenizer: The tokenizer, for the bytes of tokens.
        special: Also spell out control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty within a character."""
        return self._decoder.decode(self._tokenizer.piece(token, special=self._special))

    def finish(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _token_id(token: object) -> int:
    if isinstance(token, bool):
        raise PlanError(f"[tokenizer] a token id must be a whole number, not {token!r}")
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise PlanError(f"[tokenizer] a token id must be a whole number, not {token!r:.60}") from None


def _token_ids(tokens: object) -> list[int]:
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Iterable):
        raise PlanError(f"[tokenizer] tokens must be a list of token ids, not {tokens!r:.60}")
    return [_token_id(token) for token in tokens]


def _byte_symbols() -> dict[int, str]:
    """The printable symbol of each byte in byte-level BPE vocabularies (the table of GPT-2)."""
    printable = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    symbols = {b: chr(b) for first, last in printable for b in range(ord(first), ord(last) + 1)}
    others = (b for b in range(256) if b not in symbols)
    symbols.update({b: chr(256 + i) for i, b in enumerate(others)})
    return symbols


_BYTE_OF_SYMBOL = {ord(symbol): byte for byte, symbol in _byte_symbols().items()}


def _bpe_bytes(text: str, kind: int) -> bytes:
    try:
        return bytes([_BYTE_OF_SYMBOL[ord(c)] for c in text])
    except KeyError:  # not in the byte alphabet, so the text itself
        return text.encode("utf-8", errors="surrogateescape")


def _spm_bytes(text: str, kind: int) -> bytes:
    if (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)) is not None:
        return bytes([int(byte[1], 16)])
    if kind == TokenType.BYTE:
        raise ModelError(f"[tokenizer] byte token {text!r} is not of the form <0x41>")
    return text.replace(_SPM_SPACE, " ").encode("utf-8", errors="surrogateescape")
