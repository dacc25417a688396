"""The user's door: open a GGUF file, get logits or text."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from dyno._embedding import EmbedMethods
from dyno._generate import StopFilter
from dyno._open_model import OpenModel
from dyno._sampling import DrawOptions, Sampling
from dyno._token_array import token_array
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
    """One model, open on a device, or with its weights spread over several.

    Args:
        path: GGUF file; the first part of a split one.
        device: `cpu`, `cuda:N`, or `auto` for the first GPU that this build has code for, else the CPU; which
        one it became is logged and stands in `device`. `cpu:N` is a virtual device. All weights that nothing
        else is said about lie here.
        profile: `auto` finds the best profile for this device and model, a path takes that file, None takes
        none. By itself only a profile of this model is taken.
        require_profile: Refuse to run unless an exact profile was found.
        force_profile: Take the profile that `profile` names also if it belongs to another model.
        plan_only: Decide everything (`plan`, `describe_ops`, `settings`, the profile) but read no weights and
        allocate nothing, so that a model larger than the machine can be looked at; logits and text raise
        PlanError.
        placement: Rules `REGEX=DEVICE` for tensors by name; the first that matches decides. The regular
        expression has to match a part of the name. Devices are `CPU` and the names of `device`. `auto`: where
        the model does not fit `device`, and neither another argument nor the profile places weights, layers
        or their experts lie on the CPU, as is expected to be fastest. Without rules (`()`) all lies on
        `device`. If this or one of the next three is given, the profile places nothing.
        n_gpu_layers: So many of the last layers lie on `device`, the others on the CPU. The output counts as
        one more layer. -1: all on `device`.
        cpu_moe: The experts of all layers lie on the CPU.
        n_cpu_moe: The experts of the first so many layers lie on the CPU.
        virtual_devices: So many further CPU devices `cpu:1`, `cpu:2`, … with memory of their own, at most 16.
        They try a placement without a GPU: logits stay the same bit for bit. A mapping by name gives each a
        link of `link_gbps` (GB/s) and `latency_us`, for which transfers wait, and `memory_mib`, which its
        weights, cache and arena have to fit. With `streams`, it takes copies of the CPU's weights for
        prompts, as a GPU does.
        vram: The main device may hold so much, in bytes or as `16GiB`: a smaller device out of a larger one.
        ram: Likewise the CPU.
        split: `layer` puts the layers over all GPUs, or over all virtual devices, in their order.
        tensor_split: Shares of these devices, as `[3, 1]`; by default as much memory as each has.
        expert_use: Recorded use of the model's experts, as `dyno experts --output` writes it, for the setting
        `expert_cache_mib`; with 0 MiB it does nothing, which a warning says. By default the use that
        `dyno experts` has kept for this model.
        **settings: Values by name, as in `dyno.settings.SETTINGS`; they override the profile.

    Raises:
        GgufError: The file is not valid GGUF; later, it was truncated or written to while weights are read
        from it (the setting `mmap`). Another file that is renamed to its name changes nothing.
        ModelError: The file describes no model that can be built.
        ProfileError: The profile can't be used, or `require_profile` found none.
        PlanError: Unknown setting, impossible value, the plan does not fit, or a rule can't be read, matches
        no tensor or names no device of the plan.
        UnsupportedError: An unknown architecture, or weights on the CPU beside a GPU.
        DeviceError: No such device in this build or machine, or a GPU that this build has no code for; later,
        if a forked child uses the engine of its parent.
        DeviceLostError: This process has lost that GPU, or the engine a virtual device; any method that needs
        it raises it too, from then on.
        OutOfMemoryError: It does not fit into the memory of its devices; the message says what to change.

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
            reset: Start at position 0; False appends to what the sequence holds.
            rows: `all` tokens, only the `last` one (cheaper: one row of the output matrix product), or
            `none`.
            slot: Which of the engine's sequences.
            device_array: Leave the logits in the memory of the device.

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
            reset: Start these sequences at position 0; False appends to them.
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
        """Number of tokens that a sequence holds."""
        return int(self._open().position(slot))

    def rewind(self, position: int, slot: int = 0) -> None:
        """Forget what a sequence holds from `position` on.

        A model with recurrent state (`model["recurrent_layers"]` above 0) goes back only to 0 and to places
        of which the caller still holds a `checkpoint()`. If layers keep their windows alone
        (`plan["cache_window"]` above 0; see the setting `window_cache`), a sequence goes back to checkpoints,
        by 256 tokens, to where the last decode began, and to multiples of `plan["window_stride"]`.

        Raises:
            PlanError: The sequence does not reach that far, a generation owns it, or recurrent state or a
            window does not go back there; the message names the nearest place before it.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(slot, int(self.settings["sequences"]))
            session.rewind(position, slot)

    def copy_sequence(self, source: int, target: int) -> None:
        """Make the sequence of slot `target` hold what that of `source` holds.

        Raises:
            PlanError: No such slot, or a generation owns one of them.
        """
        with self._lock:
            session = self._open()
            for slot in (source, target):
                self._slots.check_free(slot, int(self.settings["sequences"]))
            session.copy(source, target)

    def checkpoint(self, slot: int = 0) -> _core.Checkpoint:
        """Where a sequence is now, for `restore()` and `rewind()`.

        Recurrent state is copied: `state_bytes` of the result is the memory of that copy, which lasts while
        somebody holds it. Keys and values are not copied: a checkpoint is good until its sequence forgets a
        position before it. If layers keep their windows alone, only the newest `plan["window_checkpoints"]`
        are good; these within 256 tokens of the end of their sequence do not count, and a generation takes
        no place of theirs.

        Raises:
            PlanError: No such slot, or a generation owns it.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(slot, int(self.settings["sequences"]))
            return session.checkpoint(slot)

    def restore(self, checkpoint: _core.Checkpoint) -> None:
        """Bring the sequence of a checkpoint back to it; what came behind is forgotten.

        Raises:
            PlanError: The sequence has forgotten what was before the checkpoint, newer checkpoints have taken
            its place in the cache, another engine made it, or a generation owns the sequence.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(checkpoint.slot, int(self.settings["sequences"]))
            session.restore(checkpoint)

    def load_draft_head(self) -> None:
        """Load the head of the file that predicts one token further (MTP), for `draft()`.

        Sequences that begin from now on can be asked for drafts; their hidden rows take `n_embd` floats a
        token in the machine's memory. On the CPU the head's matrices are read from the file's pages. On a GPU
        it takes the model's embedding and output, and `plan["draft_head"]` says what else it needs. Tokens of
        a generation are then drawn with the host in between.

        Raises:
            UnsupportedError: The file has no such head, its architecture's is not known here, or the model
            lies on a GPU and another device.
            OutOfMemoryError: The head does not fit.
        """
        with self._lock:
            self._open().load_draft_head()

    def draft(self, token: int, slot: int = 0) -> NDArray[np.float32]:
        """The draft head's logits behind the next token, before the model has computed that token.

        Decode `token` afterwards, together with the drafted one, and keep what the model agrees with: the
        sequence itself does not change here.

        Args:
            token: The token that follows what the sequence holds, for example the one just drawn.
            slot: The sequence.

        Returns:
            Logits `[n_vocab]` of the token behind `token`.

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
        stop: Sequence[str] | str = (),
        *,
        parse_special: bool = True,
        slot: int | None = None,
        **more: Unpack[DrawOptions],
    ) -> Generator[str, None, None]:
        """Text that continues `prompt`, piece by piece; never half a character.

        A generation owns one of the engine's `sequences` from its first piece until its text ends, it is
        closed, fails or is dropped. Several at a time, in one thread or in many, each give the same text as
        alone.

        Args:
            prompt: Text or token ids.
            max_tokens: Tokens drawn at most; None goes on to the end of the context.
            temperature: 0 takes the most probable token every time; above, tokens are drawn.
            top_k: Draw among the k most probable tokens; 0 or -1 = all.
            top_p: Draw among the most probable tokens that together reach this probability.
            min_p: Draw among tokens at least this probable relative to the best.
            seed: The same seed draws the same text; None takes one from the system.
            stop: Strings that end the text; they are not part of it.
            parse_special: Read the names of control tokens in a text prompt as these tokens. Turn it off for
            text that you did not write.
            slot: The sequence to write into. None takes the highest free one, so that slot 0, which `logits`
            uses by itself, stays free if `sequences` is above 1.
            **more: Penalties and more, as in `dyno.Sampling`; a GPU sends logits to the host for them.

        Raises:
            PlanError: The prompt is empty or longer than the context, or an argument is impossible; at the
            first piece, no slot is free.
            ModelError: The file has no vocabulary; later, logits are not finite.
        """
        self._open()
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, **more)
        stopper = StopFilter([stop] if isinstance(stop, str) else stop)
        if slot is not None:
            self._slots.check_exists(slot, int(self.settings["sequences"]))
        tokens = prompt_tokens(self, prompt, parse_special)
        limit = most_tokens(self, tokens, max_tokens)
        return written(self, tokens, sampling, stopper, limit, slot)

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
            raise PlanError("[engine] no sequences given")
        return batch

    def _ready(
        self, batch: list[tuple[int, NDArray[np.int32]]], reset: bool, owner: Owner | None = None
    ) -> _core.Session:
        """The session, where these sequences may be fed, and start at position 0 with `reset`."""
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
                    "%s is not captured as a graph and slower for it: %s; tried again at its use %d",
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
