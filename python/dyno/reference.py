"""Files of saved log-probabilities for later comparisons.

A reference is a `.npz` file (a zip of NumPy arrays, readable with `numpy.load`): `header` (JSON as uint8:
format, model, vocabulary, ctx), `tokens` int32 [chunks, ctx] and, for each chunk, `nll_<n>` float64 [ctx/2 -
1], the negative log-likelihoods of the actual tokens, and `logprobs_<n>` float16 [ctx/2 - 1, n_vocab], the
natural log-probabilities of all tokens at the scored positions. float16 keeps three digits, and more near
zero, where probable tokens are. A reference compared with itself shows a mean KLD of about 1e-7.
"""

from __future__ import annotations

import errno
import json
import os
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from dyno.errors import PlanError

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["ReferenceReader", "ReferenceWriter", "check_destination"]

_FORMAT = "dyno-reference-1"
_MAX_HEADER_BYTES = 1 << 16


class ReferenceWriter:
    """A writer of a reference, chunk by chunk. The file gets its name when it is complete.

    Args:
        path: The file to write.
        chunks: int32 [n, ctx], the tokens that are scored.
        n_vocab: Number of log-probabilities in a row.
        model: Name of the model, for readers.
    """

    def __init__(
        self, path: str | os.PathLike[str], chunks: NDArray[np.int32], n_vocab: int, model: str
    ) -> None:
        self._path = os.fspath(path)
        self._partial = f"{self._path}.partial-{os.getpid()}"
        self._rows: list[NDArray[np.float16]] = []
        self._nll: list[NDArray[np.float64]] = []
        self._written = 0
        self._expected = len(chunks)
        self._zip = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_STORED)
        header = {"format": _FORMAT, "model": model, "n_vocab": n_vocab, "ctx": int(chunks.shape[1])}
        self._put("header", np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))
        self._put("tokens", np.ascontiguousarray(chunks, dtype=np.int32))

    def add(self, log_probs: NDArray[Any], nll: NDArray[np.float64]) -> None:
        """Add rows [n, n_vocab] of the current chunk, and the negative log-likelihoods [n] of the actual
        tokens."""
        self._nll.append(nll)
        # -inf (an excluded token) stays -inf. Finite values below the range of float16 become its smallest
        # value.
        least = float(np.finfo(np.float16).min)
        self._rows.append(
            np.where(np.isneginf(log_probs), -np.inf, np.maximum(log_probs, least)).astype(np.float16)
        )

    def end_chunk(self) -> None:
        """Finish the current chunk."""
        self._put(f"logprobs_{self._written:05d}", np.concatenate(self._rows))
        self._put(f"nll_{self._written:05d}", np.concatenate(self._nll))
        self._rows.clear()
        self._nll.clear()
        self._written += 1

    def __enter__(self) -> ReferenceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._zip.close()
            if kind is None and self._written == self._expected:
                os.replace(self._partial, self._path)
        finally:  # a full disk may only show when the file is closed
            with suppress(FileNotFoundError):
                os.unlink(self._partial)

    def _put(self, name: str, array: NDArray[Any]) -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            npy.write_array(member, array, allow_pickle=False)


def check_destination(path: str | os.PathLike[str]) -> None:
    """Check that a reference can be written to `path`, before minutes of work.

    Raises:
        IsADirectoryError, FileNotFoundError, NotADirectoryError, PermissionError: It cannot be written. The
            error names the path.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        missing = errno.ENOTDIR if os.path.exists(folder) else errno.ENOENT
        raise OSError(missing, os.strerror(missing), folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)


class ReferenceReader:
    """An open reference, whose chunks are read when needed.

    Args:
        path: A file that `ReferenceWriter` has written.

    Raises:
        PlanError: It is not such a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file = open(self._path, "rb")  # noqa: SIM115 - closed by close()
        try:
            self._open()
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            self._file.close()
            raise PlanError(
                f"[perplexity] {self._path} is not a reference that dyno wrote: {error}"
            ) from error

    def _open(self) -> None:
        self._npz = np.load(self._file, allow_pickle=False)
        raw = self._npz["header"]
        if raw.dtype != np.uint8 or raw.size > _MAX_HEADER_BYTES:
            raise ValueError(f"header of type {raw.dtype} and {raw.size} bytes")
        header = json.loads(raw.tobytes())
        if header["format"] != _FORMAT:
            raise ValueError(f"format {header['format']!r}, expected {_FORMAT!r}")
        self.n_vocab = int(header["n_vocab"])
        self.model = str(header["model"])
        self.tokens: NDArray[np.int32] = self._npz["tokens"]
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 2 or self.tokens.shape[1] < 4:
            raise ValueError(f"tokens of type {self.tokens.dtype} and shape {self.tokens.shape}")

    @property
    def ctx(self) -> int:
        """Length of a chunk in tokens."""
        return int(self.tokens.shape[1])

    def check(self, chunks: NDArray[np.int32]) -> None:
        """Check that the reference has the same tokens.

        Raises:
            PlanError: It has other tokens. The message says where they differ.
        """
        if chunks.shape[1] != self.ctx:
            raise PlanError(
                f"[perplexity] the reference {self._path} has ctx {self.ctx}, not {chunks.shape[1]}"
            )
        if len(chunks) > len(self.tokens):
            raise PlanError(
                f"[perplexity] the reference {self._path} has {len(self.tokens)} chunks, not {len(chunks)}"
            )
        different = np.flatnonzero((chunks != self.tokens[: len(chunks)]).any(axis=1))
        if different.size:
            raise PlanError(
                f"[perplexity] chunk {int(different[0])} of the reference {self._path} has other tokens: "
                "it was made from another text or with another vocabulary"
            )

    def chunk(self, number: int) -> NDArray[np.float32]:
        """Log-probabilities of one chunk, float32 [ctx/2 - 1, n_vocab].

        Raises:
            PlanError: The file ends early or the chunk has another shape.
        """
        rows = self._read(f"logprobs_{number:05d}", np.float16, (self._scored, self.n_vocab))
        return np.asarray(rows, dtype=np.float32)

    def nll(self, number: int) -> NDArray[np.float64]:
        """Negative log-likelihoods of the tokens of one chunk, float64 [ctx/2 - 1].

        Raises:
            PlanError: As in `chunk`.
        """
        return self._read(f"nll_{number:05d}", np.float64, (self._scored,))

    @property
    def _scored(self) -> int:
        return self.ctx - self.ctx // 2 - 1

    def _read(self, name: str, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
        try:
            array: NDArray[Any] = self._npz[name]
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise PlanError(f"[perplexity] {self._path}: {name} cannot be read: {error}") from error
        if array.shape != shape or array.dtype != dtype:
            wanted = f"{np.dtype(dtype)} {shape}"
            raise PlanError(
                f"[perplexity] {self._path}: {name} is {array.dtype} {array.shape}, expected {wanted}"
            )
        return array

    def close(self) -> None:
        """Close the file."""
        self._npz.close()
        self._file.close()

    def __enter__(self) -> ReferenceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
