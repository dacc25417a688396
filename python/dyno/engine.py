"""The main class of the Python API: `Engine` opens a GGUF file and computes logits or text."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from dyno._embedding import EmbedMethods
from dyno._generate import StopFilter
from dyno._open_model import OpenModel
from dyno._sampling import DrawOptions, Sampling
from dyno._token_array import token_array
from dyno._unknown_arguments import check_known
from dyno._writing import most_tokens, prompt_tokens, written
from dyno.chat._methods import ChatMethods
from dyno.diagnostics import Diagnostics
from dyno.errors import ClosedError, PlanError
from dyno.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from dyno import _core
    from dyno._slots import Owner
    from dyno.device_array import DeviceArray

__all__ = ["Engine"]

Rows = Literal["all", "last", "none"]
_log = logging.getLogger("dyno")


class Engine(ChatMethods, EmbedMethods, OpenModel):
    """A model that is open on one device, or distributed over several devices.

    Args:
        path: GGUF file; `~` is the home folder. For a split model, the first file.
        device: `cpu`, `cuda:N`, or `auto`: the first GPU that this build has code for, or the CPU if there is
        none. The choice is logged and available as the attribute `device`. `cpu:N` is a virtual device. The
        main device has all weights that no other argument places elsewhere.
        profile: `auto` searches the best profile for this device and this model. A path uses that file. None
        uses no profile.
        require_profile: Raise ProfileError unless an exact profile was found.
        force_profile: Use the profile file in `profile` even if it belongs to another model.
        plan_only: Compute the plan, the settings and the choice of kernels and profile, but read no weights
        and allocate nothing. This also works for a model that is larger than the machine. Logits and text
        raise PlanError.
        placement: Rules `REGEX=DEVICE` that place tensors by name. The first rule whose regular expression
        matches a part of the name applies. Devices are `CPU` and the names of `device`. `auto`: if the model
        does not fit `device`, and neither another argument nor the profile places weights, dyno keeps layers
        or experts on the CPU so that the model is expected to run fastest. An empty list places all weights
        on `device`. This argument and the next three replace the placement of the profile.
        n_gpu_layers: Number of layers on `device`, counted from the end; the output layer counts as one. The
        other layers are on the CPU. -1: all layers.
        cpu_moe: Keep the expert weights of all layers on the CPU.
        n_cpu_moe: Number of first layers whose expert weights stay on the CPU.
        virtual_devices: Number of additional virtual devices `cpu:1`, `cpu:2`, …, at most 16. They run on the
        CPU but have their own memory, to test a placement without a GPU; logits stay the same bit by bit. A
        mapping by name gives each device a link with `link_gbps` (GB/s) and `latency_us`, whose transfers
        take that time, and `memory_mib`, which its weights, cache and arena must fit. With `streams`, the
        device copies CPU weights for prompts, as a GPU does.
        vram: Limit for the memory of the main device, in bytes or as text such as `16GiB`.
        ram: Limit for the memory of the CPU.
        split: `layer` distributes the layers over all GPUs, or over all virtual devices, in their order.
        tensor_split: Proportions of the layers for these devices, such as `[3, 1]`. Default: proportional to
        their memory.
        expert_use: Recorded expert counts for the setting `expert_cache_mib`, as `dyno experts --output`
        writes them. If the setting is 0, they have no effect, and a warning says so. Default: the counts that
        `dyno experts` has stored for this model.
        **settings: Values by name, as in `dyno.settings.SETTINGS`. They override the profile.

    Raises:
        GgufError: The file is not valid GGUF. Also raised later, if the file is truncated or overwritten
        while weights are read from it (see the setting `mmap`). Renaming another file to its name is safe.
        ModelError: The file does not describe a model that can be built.
        ProfileError: The profile cannot be used, or `require_profile` found no exact profile.
        PlanError: A setting is unknown, a value is impossible, the plan does not fit, or a placement rule is
        invalid, matches no tensor or names an unknown device.
        UnsupportedError: The architecture is unknown, or its weights cannot be on the CPU beside a GPU.
        DeviceError: The device does not exist in this build or machine, or this build has no code for the
        GPU. Also raised later, if a forked child uses the engine of its parent.
        DeviceLostError: This process has lost the GPU, or the engine has lost a virtual device. From then on,
        all methods that need the device raise it.
        OutOfMemoryError: The model does not fit into the memory of its devices. The message suggests changes.

    Example:
        >>> with Engine("model.gguf", threads=4) as engine:  # doctest: +SKIP
        ...     print("".join(engine.generate("def main", max_tokens=32)))
    """

    # ---- logits ----

    @overload
    def logits(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        reset: bool = True,
        rows: Rows = "all",
        slot: int = 0,
        device_array: Literal[False] = False,
    ) -> NDArray[np.float32]: ...
    @overload
    def logits(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        reset: bool = True,
        rows: Rows = "all",
        slot: int = 0,
        device_array: Literal[True],
    ) -> DeviceArray: ...
    def logits(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        reset: bool = True,
        rows: Rows = "all",
        slot: int = 0,
        device_array: bool = False,
    ) -> NDArray[np.float32] | DeviceArray:
        """Logits after each of `tokens`.

        Args:
            tokens: Token ids.
            reset: Start at position 0. False: append to the tokens that the sequence holds.
            rows: `all` tokens, only the `last` token (which is cheaper), or `none`.
            slot: Number of the sequence.
            device_array: Keep the logits in the memory of the device.

        Returns:
            float32 [n_tokens, n_vocab]; [1, n_vocab] for `last`, [0, n_vocab] for `none`. With
            `device_array`, anything that takes DLPack reads them without a copy, such as
            `cupy.from_dlpack`, or `numpy.from_dlpack` on the CPU.

        Raises:
            PlanError: No tokens, a token outside the vocabulary, a position past the context, or a generation
            owns the slot.
            OutOfMemoryError: The device has no memory for the logits of `device_array`.
        """
        if device_array:
            batch = self._batch({slot: tokens}, rows)
            with self._lock:
                session = self._ready(batch, reset)
                logits = session.decode_to_device(batch, rows=rows)[0]
                self._tell_failed_captures(session)
                return logits
        result = self._decode({slot: tokens}, reset=reset, rows=rows)[0]
        return result[slot]

    def logits_batch(
        self,
        sequences: Mapping[int, Sequence[int] | NDArray[np.integer[Any]]],
        *,
        reset: bool = True,
        rows: Rows = "all",
    ) -> dict[int, NDArray[np.float32]]:
        """Logits of several sequences, computed together in one batch.

        Args:
            sequences: Token ids by slot, 0 to `sequences` - 1 (a setting of the engine); lengths may differ.
            reset: Start these sequences at position 0. False: append to them.
            rows: As in `logits`.

        Returns:
            float32 [n_tokens, n_vocab] by slot, in the order given.

        Raises:
            PlanError: As in `logits`, or a slot that the engine was not opened for.
        """
        return self._decode(sequences, reset=reset, rows=rows)[0]

    def reset(self, slot: int | None = None) -> None:
        """Forget a sequence, or all of them.

        Raises:
            PlanError: No such slot, or a generation owns it.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(slot, int(self.settings["sequences"]))
            session.reset(slot)

    def position(self, slot: int = 0) -> int:
        """Number of tokens that a sequence holds.

        Raises:
            PlanError: No such slot.
        """
        session = self._open()
        self._slots.check_exists(slot, int(self.settings["sequences"]))
        return int(session.position(slot))

    def rewind(self, position: int, slot: int = 0) -> None:
        """Forget all tokens of a sequence from `position` on.

        A model with recurrent state (`model["recurrent_layers"]` above 0) can be rewound only to position 0
        and to existing checkpoints of the sequence. If layers cache only their windows
        (`plan["cache_window"]` above 0; see the setting `window_cache`), a sequence can be rewound by up to
        256 tokens, to checkpoints, to the beginning of the last decode, and to multiples of
        `plan["window_stride"]`.

        Raises:
            PlanError: The sequence is shorter, a generation owns it, or recurrent state or a window does not
            allow this position. The message names the nearest earlier position that is possible.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(slot, int(self.settings["sequences"]))
            session.rewind(position, slot)

    def copy_sequence(self, source: int, target: int) -> None:
        """Copy the sequence in slot `source` to slot `target`.

        Raises:
            PlanError: No such slot, or a generation owns one of them.
        """
        with self._lock:
            session = self._open()
            for slot in (source, target):
                self._slots.check_free(slot, int(self.settings["sequences"]))
            session.copy(source, target)

    def checkpoint(self, slot: int = 0) -> _core.Checkpoint:
        """Save the current position of a sequence, for `restore()` and `rewind()`.

        Recurrent state is copied. `state_bytes` of the result is the size of that copy, which exists as long
        as the result. Keys and values are not copied, so a checkpoint is valid until its sequence forgets an
        earlier position. If layers cache only their windows, only the newest `plan["window_checkpoints"]`
        checkpoints are valid. Checkpoints within 256 tokens of the end of their sequence do not count, and
        generations do not use up this number.

        Raises:
            PlanError: No such slot, or a generation owns it.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(slot, int(self.settings["sequences"]))
            return session.checkpoint(slot)

    def restore(self, checkpoint: _core.Checkpoint) -> None:
        """Return a sequence to its checkpoint, and forget the tokens after it.

        Raises:
            PlanError: The sequence has forgotten earlier positions, newer checkpoints have replaced this one
            in the cache, another engine created it, or a generation owns the sequence.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(checkpoint.slot, int(self.settings["sequences"]))
            session.restore(checkpoint)

    def load_draft_head(self) -> None:
        """Load the multi-token prediction (MTP) head of the file, for `draft()`.

        The head can draft for sequences that begin after this call. Their hidden rows need `n_embd` floats
        per token in main memory. On the CPU, its matrices are read from the mapped file. On a GPU,
        the head shares the embedding and output matrices of the model, and `plan["draft_head"]` shows its
        additional memory. While a head is loaded, generation on a GPU waits for the host after each token.

        Raises:
            UnsupportedError: The file has no such head, dyno does not support it for this architecture, or
            the model is on a GPU and another device.
            OutOfMemoryError: The head does not fit.
        """
        with self._lock:
            self._open().load_draft_head()

    def draft(self, token: int, slot: int = 0) -> NDArray[np.float32]:
        """Logits of the MTP head for the token after `token`, before the model has decoded `token`.

        The sequence does not change. Afterwards decode `token` together with the drafted token, and keep the
        drafted token only if the model agrees with it.

        Args:
            token: The next token of the sequence, for example the one that was just sampled.
            slot: Number of the sequence.

        Returns:
            Logits `[n_vocab]` for the token after `token`.

        Raises:
            PlanError: No head is loaded, or it was loaded after the sequence began; the sequence is empty, no
            such slot or token, or a generation owns the slot.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(slot, int(self.settings["sequences"]))
            logits: NDArray[np.float32] = session.draft([(slot, token)])[0]
            return logits

    # ---- text ----

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ModelError: The file has no vocabulary.
            UnsupportedError: Its tokenizer is not known here.
            ClosedError: The engine was closed before the tokenizer was first used.
        """
        if self._tokenizer is None:
            if self._file is None:
                raise ClosedError(f"[engine] the engine of {self.path} is closed")
            self._tokenizer = Tokenizer.from_metadata(self._file)
        return self._tokenizer

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of `text`; see `Tokenizer.encode`."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Text of `tokens`; see `Tokenizer.decode`."""
        return self.tokenizer.decode(tokens, special=special)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
        stop: Sequence[str] | str | None = (),
        *,
        parse_special: bool = True,
        slot: int | None = None,
        ignore_end: bool = False,
        **more: Unpack[DrawOptions],
    ) -> Generator[str, None, None]:
        """Generate text that continues `prompt`, in pieces of whole characters.

        A generation owns one of the engine's `sequences` from its first piece until it ends, is closed, fails
        or is garbage-collected. Several generations can run at the same time, in one or more threads. Each
        gives the same text as it does alone.

        Args:
            prompt: Text or token ids.
            max_tokens: Maximum number of tokens. None: up to the end of the context.
            temperature: 0: always take the most probable token. Above 0: sample.
            top_k: Sample from the k most probable tokens. 0 or -1: from all tokens.
            top_p: Sample from the most probable tokens whose probabilities add up to this.
            min_p: Sample from tokens at least this probable relative to the most probable one.
            seed: The same seed draws the same text; None takes one from the system.
            stop: Strings that end the text; they are not part of it.
            parse_special: Read the names of control tokens in a text prompt as these tokens. Turn it off for
            text that you did not write.
            slot: The sequence to write into. None takes the highest free one, so that slot 0, which `logits`
            uses by itself, stays free if `sequences` is above 1.
            ignore_end: Continue after an end-of-generation token, up to `max_tokens`, so that texts of a
            benchmark have the same length.
            **more: Penalties and more, as in `dyno.Sampling`; a GPU sends logits to the host for them.

        Raises:
            PlanError: The prompt is empty or longer than the context, or an argument is impossible; at the
            first piece, no slot is free.
            ModelError: The file has no vocabulary; later, logits are not finite.
        """
        self._open()
        check_known(self.generate, more)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, **more)
        stopper = StopFilter(stop)
        if slot is not None:
            self._slots.check_exists(slot, int(self.settings["sequences"]))
        tokens = prompt_tokens(self, prompt, parse_special)
        limit = most_tokens(self, tokens, max_tokens)
        return written(self, tokens, sampling, stopper, limit, slot, ignore_end=ignore_end)

    @property
    def diagnostics(self) -> Diagnostics:
        """Hooks for tests, benchmarks and the tuner."""
        return Diagnostics(self)

    # ---- inside ----

    def _batch(
        self, sequences: Mapping[int, Sequence[int] | NDArray[np.integer[Any]]], rows: Rows
    ) -> list[tuple[int, NDArray[np.int32]]]:
        if rows not in ("all", "last", "none"):
            raise PlanError(f"[engine] rows must be 'all', 'last' or 'none', not {rows!r}")
        batch = [(int(slot), token_array(tokens)) for slot, tokens in sequences.items()]
        if not batch:
            raise PlanError("[engine] the batch holds no sequence; give at least one slot with its tokens")
        return batch

    def _ready(
        self, batch: list[tuple[int, NDArray[np.int32]]], reset: bool, owner: Owner | None = None
    ) -> _core.Session:
        """The session, after a check that `owner` may decode tokens of these sequences. With `reset`, they
        start at position 0."""
        session = self._open()
        self._check_batch(session, batch, reset, owner)
        if reset:
            for slot, _ in batch:
                session.reset(slot)
        return session

    def _decode(
        self,
        sequences: Mapping[int, Sequence[int] | NDArray[np.integer[Any]]],
        *,
        reset: bool,
        rows: Rows,
        pinned_routing: NDArray[np.int32] | None = None,
        capture_routing: bool = False,
        owner: Owner | None = None,
    ) -> tuple[dict[int, NDArray[np.float32]], NDArray[np.int32] | None]:
        batch = self._batch(sequences, rows)
        with self._lock:
            session = self._ready(batch, reset, owner)
            logits, routing = session.decode(
                batch, rows=rows, pinned_routing=pinned_routing, capture_routing=capture_routing
            )
            self._tell_failed_captures(session)
        result: dict[int, NDArray[np.float32]] = {}
        start = 0
        for slot, tokens in batch:
            count = {"all": len(tokens), "last": 1, "none": 0}[rows]
            if logits is None:
                result[slot] = np.empty((0, self._n_vocab), dtype=np.float32)
            else:
                result[slot] = logits[start : start + count]
            start += count
        return result, routing

    def _tell_failed_captures(self, session: _core.Session) -> None:
        failures = int(session.capture_failures)
        if failures == self._capture_failures:
            return
        self._capture_failures = failures
        for row in session.captures():
            if row["reason"]:
                _log.warning(
                    "%s runs without a CUDA graph, which is slower: %s; the next attempt is at use %d",
                    "drawing" if row["work"] == "draw" else f"decoding {row['tokens']} tokens at a time",
                    row["reason"],
                    row["next_attempt"],
                )

    def _check_batch(
        self,
        session: _core.Session,
        batch: list[tuple[int, NDArray[np.int32]]],
        reset: bool,
        owner: Owner | None = None,
    ) -> None:
        self._slots.check_batch(session, batch, reset, self.settings, self._n_ctx_train, owner)
