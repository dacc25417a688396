"""A model that is open on its devices, with its profile, settings and plan."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from dyno import _effective, _expert_use, _selection
from dyno._at_exit import stop_at_exit
from dyno._embedding import file_pooling
from dyno._locks import for_one_call, is_mine
from dyno._model_path import model_path
from dyno._placement import Placement
from dyno._slots import Slots
from dyno._ubatch import UsualUbatch, free_bytes
from dyno.devices import limited, resolve_device
from dyno.errors import ClosedError, DeviceError, DynoError, PlanError
from dyno.settings import has_latent_cache, is_dense_quantised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from dyno import _core
    from dyno._effective import EffectiveSettings
    from dyno._virtual_devices import VirtualDevices
    from dyno.profiles import MatchResult, Profile
    from dyno.scheduler import Scheduler
    from dyno.tokenizer import Tokenizer

__all__ = ["OpenModel"]

_log = logging.getLogger("dyno")

_OFTEN_FITS = 0.8
"""Share of GPU memory that weights may take, so that KV cache and arena fit beside them."""


class OpenModel:
    """The base class of `Engine`: it opens a file, holds the session and describes how the model runs.

    `Engine` describes the arguments.
    """

    _usual_sequences = 1
    """Default of the setting `sequences`."""

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
        cpu_moe: bool | None = None,
        n_cpu_moe: int | None = None,
        virtual_devices: VirtualDevices = 0,
        vram: int | str | None = None,
        ram: int | str | None = None,
        split: str = "none",
        tensor_split: Sequence[float] = (),
        expert_use: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        from dyno import _core

        self._plan_only = plan_only

        self._session: _core.Session | None = None
        self._own_lock = threading.RLock()
        self._process = os.getpid()
        self._slots = Slots()
        self._scheduler: Scheduler | None = None  # while open, samples the tokens of all generations
        self._scheduler_opens = False
        self._capture_failures = 0  # number of failures already reported
        self._tokenizer: Tokenizer | None = None
        self.path = model_path(path)
        self._placement = Placement.of(
            placement, virtual_devices, n_gpu_layers, cpu_moe, n_cpu_moe,
            {"vram": vram, "ram": ram}, split, tensor_split,
        )  # fmt: skip
        self._device = limited(
            resolve_device(device, self._placement.virtual_devices), self._placement.vram, self._placement.ram
        )
        self._placement.warn(self.device)
        self._rates: dict[str, dict[str, float]] | None = None
        self._expert_use = None if expert_use is None else _expert_use.read(expert_use)
        arguments = _effective.check_arguments(settings, self._device.kind) | dict(self._placement.settings)
        # Open the file once, so that profile, weights and vocabulary come from the same file.
        file = _core.Gguf(self.path)
        self._file: _core.Gguf | None = file
        model = _core.describe_model(file)
        self._n_ctx_train = int(model["n_ctx_train"])
        self._n_vocab = int(model["n_vocab"])
        self._recurrent = int(model["recurrent_layers"]) > 0
        self._file_pooling = file_pooling(file.get(f"{model['architecture']}.pooling_type"))
        self._latent_cache = has_latent_cache(model)
        self._dense_quantised = is_dense_quantised(model)
        self._arguments = arguments
        self._usual_ubatch = UsualUbatch(
            file,
            self._device.info,
            self.device,
            # With plan_only, the plan is for the whole device, and nothing starts on it.
            None if plan_only else functools.partial(free_bytes, self.device),
        )
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
        stop_at_exit(self)
        with self._own_lock:
            self._session, self._rejected_kernels = _selection.open_session(
                self._selection, functools.partial(self._new_session, file)
            )
        self.settings = self._resolve()
        self._selection.report()
        for warning in self._session.warnings:
            _log.warning("%s", warning)
        self._warn_of_unknown_use()
        self._placement.warn_of_idle_devices(self.device, self.settings["placement"])
        if 0 < int(self.settings["layers"]) < int(model["n_layers"]):
            _log.warning(
                "layers=%d of %d: the answers are meaningless; only speed and memory can be measured",
                self.settings["layers"], model["n_layers"],
            )  # fmt: skip

    # ---- settings, plan, profile ----

    def set(self, **settings: Any) -> None:
        """Change session settings without reloading the model. The state of all sequences stays valid.

        Raises:
            OutOfMemoryError: The settings need too much memory; nothing has changed.
            PlanError: A name is unknown, a value is impossible, or the setting only takes effect when the
            engine is opened.
        """
        self._change(
            "session",
            settings,
            lambda session, wanted: session.set(wanted.of_kind(self._device.kind, "session")),
        )

    def set_context(self, **settings: Any) -> None:
        """Change context settings. The KV cache is replaced by an empty one; the weights stay.

        If the new cache does not fit, the settings stay, but the cache can be empty.

        Raises:
            PlanError: A name is unknown, a value is impossible, a setting is of another kind, memory is too
            small, a generation owns a slot, or a scheduler is open.
        """

        def change(session: _core.Session, wanted: EffectiveSettings) -> None:
            if self._scheduler is not None or self._scheduler_opens:
                raise PlanError(
                    "[engine] set_context() was called while a scheduler is open; close the scheduler first"
                )
            self._slots.check_free(None, int(self.settings["sequences"]))
            self._replace_context(session, wanted)

        self._change("context", settings, change)

    def _replace_context(self, session: _core.Session, wanted: EffectiveSettings) -> None:
        """Replace the context settings, and the u-batch if its default depends on them."""
        now, then = (each.of_kind(self._device.kind, "session") for each in (self.settings, wanted))
        context = wanted.of_kind(self._device.kind, "context")
        if then == now:
            session.set_context(context)
        elif then["ubatch"] < now["ubatch"]:  # first, because its memory may be needed
            session.set(then)
            try:
                session.set_context(context)
            except DynoError:
                session.set(now)
                raise
        else:
            session.set_context(context)
            try:
                session.set(then)
            except DynoError:
                session.set_context(self.settings.of_kind(self._device.kind, "context"))
                raise

    @contextlib.contextmanager
    def _opens_scheduler(self) -> Iterator[None]:
        """Mark that a scheduler is being opened, so that settings stay. Raises PlanError if one is open or
        being opened."""
        with self._lock:
            if self._scheduler is not None or self._scheduler_opens:
                raise PlanError("[scheduler] this engine already has a scheduler; close it first")
            self._scheduler_opens = True
        try:
            yield
        finally:
            self._scheduler_opens = False

    def _change(
        self,
        kind: str,
        settings: Mapping[str, Any],
        change: Callable[[_core.Session, EffectiveSettings], None],
    ) -> None:
        """Change settings of one kind. After an error, the settings are those from before."""
        checked = _effective.check_arguments(settings, self._device.kind, kinds=(kind,))
        before, self._arguments = self._arguments, {**self._arguments, **checked}
        try:
            wanted = self._resolve()
            with self._lock:
                change(self._open(), wanted)
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
        """A line such as `device: cuda:0, NVIDIA H200`, with the reason if dyno chose the device."""
        return self._device.headline

    @property
    def profile(self) -> MatchResult | None:
        """The active profile and how well it matches; None if the engine runs on defaults."""
        return self.match if self.match.profile is not None else None

    @property
    def match(self) -> MatchResult:
        """The outcome of the search for a profile, also if it found none."""
        return self._selection.match

    @property
    def expert_choices(self) -> dict[str, int]:
        """Counts since the engine was opened, for layers with an expert cache. `chosen` counts expert
        choices, `cached` those that hit the cache. Both are 0 without such layers, and streamed prompts do
        not count. `swapped` counts experts that replaced another one (`expert_cache=adaptive`).
        """
        return dict(self._open().experts)

    @property
    def fallbacks(self) -> list[str]:
        """A line with the reason for each profile entry that fell back to the default."""
        return list(self._selection.lines)

    @property
    def model(self) -> dict[str, Any]:
        """The model of the file: architecture, dimensions, layers, types."""
        return dict(self._open().model)

    @property
    def plan(self) -> dict[str, Any]:
        """The memory plan: the place of each tensor, and the bytes of weights, KV cache and arena, in total
        and by device."""
        return dict(self._open().plan)

    def describe_plan(self) -> str:
        """The plan as text for people."""
        return str(self._open().describe_plan())

    def describe_nodes(self) -> list[dict[str, Any]]:
        """All launches of all op lists, in order, with their operands.

        Returns:
            Dicts with `list`, `name`, `key`, `device`, `layer` (None outside of layers), `tiles` (`gives` or
            `gets` rows that a GPU's kernels may pass on as f16 tiles, else None) and `operands`. An
            operand is None where the launch has none, a weight's name, a number, or a dict of a value:
            `name`, `device`, `access` (read, write, update), `first_use` and `last_use` (launches of its
            list), `arena_offset`, `bytes`.
        """
        return list(self._open().nodes())

    def describe_ops(self, tokens: int | None = None) -> list[dict[str, Any]]:
        """All ops, each with its chosen configuration and the reason.

        Args:
            tokens: Size of the batch in tokens; None lists all batch sizes with different configurations.

        Returns:
            Dicts with `list`, `family`, `key`, `device`, `count`, `tokens`, `config`, `reason`, `tiles`,
            `bytes` and `flops`. `tiles` has the height of f16 tiles that the op reads (`x_tiles`) or
            leaves (`y_tiles`, `out_tiles`), if each token is of another sequence. It is empty for float32.
        """
        return list(self._open().ops(tokens))

    def kernel_report(self) -> list[dict[str, Any]]:
        """State and reason of each kernel entry in the profile: `applied`, `rejected` or `unused`."""
        rows = list(self._open().kernel_report())
        known = {(row["key"], row["tokens"]) for row in rows}
        return rows + [row for row in self._rejected_kernels if (row["key"], row["tokens"]) not in known]

    # ---- life ----

    def close(self) -> None:
        """Free weights, KV cache and threads. A second call does nothing, nor does a call in a forked child.

        A signal handler may close the engine during a call of its own thread. That call then raises
        ClosedError, unless the handler raises another error. `close` waits for a call of another thread.
        """
        if os.getpid() != self._process:
            return
        with self._own_lock:
            session, self._session = self._session, None
            self._file = None
        if session is not None:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._session is None else "open"
        return f"{type(self).__name__}({self.path!r}, device={self.device!r}, {state})"

    def __reduce__(self) -> NoReturn:
        raise PlanError(
            f"[engine] the engine of {self.path} cannot be copied or pickled, because its memory belongs to "
            "this object and this process; open the file again: Engine(path)"
        )

    # ---- inside ----

    @property
    def _lock(self) -> threading.RLock:
        """A context manager that locks the engine for one call. Raises PlanError for a call inside another
        one, which only a signal handler can make."""
        self._check_process()  # first, since in a forked child a missing thread may hold the lock
        return for_one_call(self._own_lock, "engine", "close() it")

    @property
    def _in_call(self) -> bool:
        """Whether a signal handler runs during a call of the engine or its tokenizer."""
        return is_mine(self._own_lock) or (self._tokenizer is not None and self._tokenizer.in_call)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise DeviceError(
                f"[engine] the engine of {self.path} was opened in process {self._process}, and this is "
                f"process {os.getpid()}; open it again in this one"
            )

    def _open(self) -> _core.Session:
        self._check_process()
        if self._session is None:
            raise ClosedError(f"[engine] the engine of {self.path} is closed")
        return self._session

    def _resolve(self) -> EffectiveSettings:
        return _effective.resolve(
            self._arguments,
            self._selection.settings,
            self._device.kind,
            self._n_ctx_train,
            self._latent_cache,
            int(self._device.info.get("compute_capability", 0)),
            self._dense_quantised,
            self._usual_ubatch,
            self._usual_sequences,
        )

    def _new_session(self, file: _core.Gguf, plan_only: bool) -> _core.Session:
        """A new session with the arguments and with the accepted part of the profile."""
        from dyno import _core

        self.settings = self._resolve()
        load = self.settings.of_kind(self._device.kind, "load")
        if self._rates is None:
            self._rates = self._known_rates(file, load)
        chooses_cache = self._chooses_cache(file, load)
        return _core.Session(
            file,
            load={"device": self.device, **self._placement.load(load, self.device)},
            context=self.settings.of_kind(self._device.kind, "context"),
            session=self.settings.of_kind(self._device.kind, "session"),
            kernels=self._selection.kernels,
            plan_only=plan_only or self._plan_only,
            placement=self._placement.for_session(load, self._rates, choose_cache=chooses_cache)
            | _expert_use.for_session(
                file,
                int(load["expert_cache_mib"]),
                self._expert_use,
                may_choose=chooses_cache,
            ),
        )

    def _chooses_cache(self, file: _core.Gguf, load: Mapping[str, Any]) -> bool:
        """Whether the plan may choose the size of the expert cache: placement is automatic, and no size is
        set."""
        unset = self.settings.origins.get("expert_cache_mib", "default") == "default"
        return unset and self._may_be_placed(file, load)

    def _may_be_placed(self, file: _core.Gguf, load: Mapping[str, Any]) -> bool:
        """Whether the weights may not fit the main device, so that the plan leaves a part to the CPU."""
        if not self._placement.for_session(load, {})["automatic"]:
            return False
        if self._device.kind == "cuda":
            free = None if self._plan_only else free_bytes(self.device)
            memory = int(self._device.info["memory_bytes"])
            memory = memory if free is None else min(memory, free)
        else:
            memory = self._placement.limit_of(self.device)
        return 0 < memory * _OFTEN_FITS < sum(int(tensor["nbytes"]) for tensor in file.tensors())

    def _known_rates(self, file: _core.Gguf, load: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """The stored rates. If a placement for a GPU is about to be chosen, missing rates are measured."""
        gpu = self._device.kind == "cuda" and not self._plan_only
        threads = max(0, int(self.settings.get("threads", 0)))
        missing = gpu and self._may_be_placed(file, load)
        return self._placement.rates(self._device, threads, measure_missing=missing)

    def _warn_of_unknown_use(self) -> None:
        mib = int(self._open().plan["settings"]["expert_cache_mib"])
        if mib == 0 and self._expert_use is not None:
            _log.warning("expert_use has no effect, because expert_cache_mib is 0 and no experts are cached")
        if mib == 0 and self.settings.get("expert_cache") == "adaptive":
            _log.warning(
                "expert_cache=adaptive has no effect, because expert_cache_mib is 0 and no experts are cached"
            )
        cached = any(t["name"].endswith("(cached)") for t in self._open().plan["tensors"]) if mib else False
        if not cached or self._file is None or self._expert_use is not None:
            return
        if _expert_use.remembered(self._file) is None:
            _log.warning(
                "expert_cache_mib=%d: no use of this model's experts is recorded, so the first experts of "
                "each layer are cached; `dyno experts %s --text FILE` records it",
                mib, self.path,
            )  # fmt: skip
