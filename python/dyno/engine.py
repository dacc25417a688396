"""The user's door: open a GGUF file, get logits or text."""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from dyno import _effective, _selection
from dyno._generate import StopFilter
from dyno._placement import Placement
from dyno._sampling import DrawOptions, Sampling
from dyno._slots import Owner, Slots
from dyno._token_array import token_array
from dyno._ubatch import UsualUbatch
from dyno._writing import most_tokens, prompt_tokens, written
from dyno.chat._methods import ChatMethods
from dyno.devices import resolve_device
from dyno.diagnostics import Diagnostics
from dyno.errors import DeviceError, DynoError, PlanError
from dyno.settings import has_latent_cache
from dyno.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from dyno import _core
    from dyno._effective import EffectiveSettings
    from dyno._virtual_devices import VirtualDevices
    from dyno.device_array import DeviceArray
    from dyno.profiles import MatchResult, Profile
    from dyno.scheduler import Scheduler

__all__ = ["Engine"]

Rows = Literal["all", "last", "none"]
_log = logging.getLogger("dyno")


class Engine(ChatMethods):
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
        the model does not fit `device`, and no other argument places weights, layers or their experts lie on
        the CPU, as is expected to be fastest. Without rules (`()`) all lies on `device`.
        n_gpu_layers: So many of the last layers lie on `device`, the others on the CPU. The output counts as
        one more layer. None: all on `device`.
        cpu_moe: The experts of all layers lie on the CPU.
        n_cpu_moe: The experts of the first so many layers lie on the CPU.
        virtual_devices: So many further CPU devices `cpu:1`, `cpu:2`, … with memory of their own, at most 16.
        They try a placement without a GPU: logits stay the same bit for bit. A mapping by name gives each a
        link of `link_gbps` (GB/s) and `latency_us`, for which transfers wait, and `memory_mib`, which its
        weights, cache and arena have to fit.
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

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = "auto",
        profile: str | os.PathLike[str] | Profile | None = "auto",
        *,
        require_profile: bool = False,
        force_profile: bool = False,
        plan_only: bool = False,
        placement: Sequence[str] | str = "auto",
        n_gpu_layers: int | None = None,
        cpu_moe: bool = False,
        n_cpu_moe: int = 0,
        virtual_devices: VirtualDevices = 0,
        **settings: Any,
    ) -> None:
        from dyno import _core

        self._plan_only = plan_only

        self._session: _core.Session | None = None
        self._own_lock = threading.Lock()
        self._process = os.getpid()
        self._slots = Slots()
        self._scheduler: Scheduler | None = None  # draws the tokens of all generations while it is open
        self._capture_failures = 0  # that were told of
        self._tokenizer: Tokenizer | None = None
        self.path = os.fspath(path)
        self._placement = Placement.of(placement, virtual_devices, n_gpu_layers, cpu_moe, n_cpu_moe)
        self._device = resolve_device(device, len(self._placement.virtual_devices))
        self._placement.warn(self.device)
        self._rates = self._placement.rates(self._device)
        arguments = _effective.check_arguments(settings, self._device.kind)
        # Opened once: another file of this name must not give its profile, its weights or its vocabulary.
        file = _core.Gguf(self.path)
        self._file: _core.Gguf | None = file
        model = _core.describe_model(file)
        self._n_ctx_train = int(model["n_ctx_train"])
        self._n_vocab = int(model["n_vocab"])
        self._latent_cache = has_latent_cache(model)
        self._arguments = arguments
        self._usual_ubatch = UsualUbatch(file, self._device.info, self._placement, self.device)
        self._selection = _selection.select(
            file,
            model,
            profile,
            arguments,
            self._device.info,
            require=require_profile,
            force=force_profile,
        )
        self.settings: EffectiveSettings = self._resolve()
        self._session, self._rejected_kernels = _selection.open_session(
            self._selection, functools.partial(self._new_session, file)
        )
        self.settings = self._resolve()
        self._selection.report()
        for warning in self._session.warnings:
            _log.warning("%s", warning)

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
        of which the caller still holds a `checkpoint()`.

        Raises:
            PlanError: The sequence does not reach that far, a generation owns it, or recurrent state does not
            go back there; the message names the nearest place before it.
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
        position before it.

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
            PlanError: The sequence has forgotten what was before the checkpoint, another engine made it, or a
            generation owns the sequence.
        """
        with self._lock:
            session = self._open()
            self._slots.check_free(checkpoint.slot, int(self.settings["sequences"]))
            session.restore(checkpoint)

    # ---- text ----

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ModelError: The file has no vocabulary.
            UnsupportedError: Its tokenizer is not known here.
            PlanError: The engine was closed before the tokenizer was first used.
        """
        if self._tokenizer is None:
            if self._file is None:
                raise PlanError(f"[engine] the engine of {self.path} is closed")
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
            top_k: Draw among the k most probable tokens; 0 = all.
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

    # ---- settings, plan, profile ----

    def set(self, **settings: Any) -> None:
        """Change session settings without reloading the model; what the sequences hold stays valid.

        Raises:
            OutOfMemoryError: It does not fit; everything stays as it was.
            PlanError: An unknown name, an impossible value, or a setting that needs the engine to be opened
            again.
        """
        checked = _effective.check_arguments(settings, self._device.kind, kinds=("session",))
        before, self._arguments = self._arguments, {**self._arguments, **checked}
        wanted = self._resolve()
        try:
            with self._lock:
                self._open().set(wanted.of_kind(self._device.kind, "session"))
        except DynoError:
            self._arguments = before
            raise
        self.settings = wanted

    def set_context(self, **settings: Any) -> None:
        """Change context settings: the cache is made again and is empty, the weights stay.

        Raises:
            PlanError: An unknown name, an impossible value, a setting of another kind, it does not fit, or a
            generation owns a slot.
        """
        checked = _effective.check_arguments(settings, self._device.kind, kinds=("context",))
        before, self._arguments = self._arguments, {**self._arguments, **checked}
        wanted = self._resolve()
        try:
            with self._lock:
                session = self._open()
                self._slots.check_free(None, int(self.settings["sequences"]))
                session.set_context(wanted.of_kind(self._device.kind, "context"))
        except DynoError:
            self._arguments = before
            raise
        self.settings = wanted

    @property
    def device(self) -> str:
        """Name of the main device: `cpu`, `cpu:N` or `cuda:N`."""
        return self._device.name

    @property
    def device_info(self) -> dict[str, Any]:
        """Properties of the device, as the engine and the driver report them."""
        return dict(self._device.info)

    @property
    def device_headline(self) -> str:
        """`device: cuda:0, NVIDIA H200`, and why where it was not named."""
        return self._device.headline

    @property
    def profile(self) -> MatchResult | None:
        """The profile in force and how well it matches; None where the engine runs on defaults."""
        return self.match if self.match.profile is not None else None

    @property
    def match(self) -> MatchResult:
        """The outcome of the search for a profile, also if it found none."""
        return self._selection.match

    @property
    def fallbacks(self) -> list[str]:
        """One line for each entry of the profile that fell back to the default, with the reason."""
        return list(self._selection.lines)

    @property
    def model(self) -> dict[str, Any]:
        """The model of the file: architecture, dimensions, layers, types."""
        return dict(self._open().model)

    @property
    def plan(self) -> dict[str, Any]:
        """Where every tensor lies, and the bytes of weights, KV cache and arena, in all and by device."""
        return dict(self._open().plan)

    def describe_plan(self) -> str:
        """The plan as text for people."""
        return str(self._open().describe_plan())

    def describe_nodes(self) -> list[dict[str, Any]]:
        """Every launch of every op list, in order, with its operands.

        Returns:
            Dicts with `list`, `name`, `key`, `device`, `layer` (None outside of layers) and `operands`. An
            operand is None where the launch has none, a weight's name, a number, or a dict of a value:
            `name`, `device`, `access` (read, write, update), `first_use` and `last_use` (launches of its
            list), `arena_offset`, `bytes`.
        """
        return list(self._open().nodes())

    def describe_ops(self, tokens: int | None = None) -> list[dict[str, Any]]:
        """Every op with the configuration that was taken for it and why.

        Args:
            tokens: Size of the batch that the configurations are for; None lists every bucket that matters.

        Returns:
            Dicts with `list`, `family`, `key`, `device`, `count`, `tokens`, `config`, `reason`, `bytes` and
            `flops`.
        """
        return list(self._open().ops(tokens))

    def kernel_report(self) -> list[dict[str, Any]]:
        """The state of each kernel entry of the profile: `applied`, `rejected` or `unused`, with the
        reason.
        """
        rows = list(self._open().kernel_report())
        known = {(row["key"], row["tokens"]) for row in rows}
        return rows + [row for row in self._rejected_kernels if (row["key"], row["tokens"]) not in known]

    @property
    def diagnostics(self) -> Diagnostics:
        """Hooks for tests, benchmarks and the tuner."""
        return Diagnostics(self)

    # ---- life ----

    def close(self) -> None:
        """Give back weights, cache and threads. Closing twice does nothing, nor does it in a forked child."""
        if os.getpid() != self._process:
            return
        with self._lock:
            session, self._session = self._session, None
            self._file = None
        if session is not None:
            session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._session is None else "open"
        return f"Engine({self.path!r}, device={self.device!r}, {state})"

    # ---- inside ----

    @property
    def _lock(self) -> threading.Lock:
        self._check_process()  # first: a thread that a forked child does not have may hold the lock
        return self._own_lock

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise DeviceError(
                f"[engine] the engine of {self.path} was opened in process {self._process}, and this is "
                f"process {os.getpid()}; open it again in this one"
            )

    def _open(self) -> _core.Session:
        self._check_process()
        if self._session is None:
            raise PlanError(f"[engine] the engine of {self.path} is closed")
        return self._session

    def _resolve(self) -> EffectiveSettings:
        return _effective.resolve(
            self._arguments,
            self._selection.settings,
            self._device.kind,
            self._n_ctx_train,
            self._latent_cache,
            int(self._device.info.get("compute_capability", 0)),
            self._usual_ubatch,
        )

    def _new_session(self, file: _core.Gguf, plan_only: bool) -> _core.Session:
        """A session with the arguments, and the profile as far as it has been accepted."""
        from dyno import _core

        self.settings = self._resolve()
        return _core.Session(
            file,
            load={"device": self.device, **self.settings.of_kind(self._device.kind, "load")},
            context=self.settings.of_kind(self._device.kind, "context"),
            session=self.settings.of_kind(self._device.kind, "session"),
            kernels=self._selection.kernels,
            plan_only=plan_only or self._plan_only,
            placement=self._placement.for_session(self.device, self._rates),
        )

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
