"""The engine of this project as a target. It lives in a worker process, and importing it loads the compiled
engine.

If a configuration differs from the current one in load settings, the file is opened again. If it differs in
context settings, the cache is created again. Otherwise settings are switched between two calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import _core, _energy, _expert_use, profiles
from dyno._effective import usable_cores
from dyno._generate import greedy_after
from dyno._placement import NOWHERE_ELSE
from dyno._ubatch import UsualUbatch
from dyno.errors import (
    DeviceError,
    DeviceLostError,
    DynoError,
    GgufError,
    ModelError,
    OutOfMemoryError,
)
from dyno.settings import DefaultsFor, engine_defaults, has_latent_cache, is_dense_quantised, settings_for

from ...core.errors import TargetFailure, TargetLost, TargetUnusable
from ...core.options import DECIDES
from ...core.protocol import (
    Capabilities,
    Configuration,
    Description,
    GroupQuality,
    KernelOp,
    OpContext,
    Quality,
    Sample,
    Settings,
    Target,
    TrialStatus,
    Value,
    Workload,
)
from . import answers, bounds, kept_answers
from .kernel_ops import op_times, ops_with_choice
from .placing import ELSEWHERE, Placing, as_list, label, one_word, planned_bytes
from .power_meter import PowerMeter
from .prompts import Prompts, measure_routing
from .served import serve

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import numpy as np

CHECK_BATCH = 512  # largest batch in tokens whose answers are checked
SAMPLE_SECONDS = 0.1  # least seconds of work in a sample
SAMPLE_RUNS = 64  # most runs in a sample
# Energy counters are updated a few dozen times per second, so samples last longer if energy decides.
ENERGY_SECONDS, ENERGY_RUNS = 1.0, 640
# Facts of a device that may affect the bits of the exact path's answers.
_COMPUTES = ("kind", "isa", "features", "compute_capability", "sm_count", "shared_per_block_bytes", "driver")
# A GPU that has just processed a context generates more slowly for about half a second; see
# `measure.paired_rounds`.
SETTLE_SECONDS = 0.5
_CAPTURE_RUNS = 3  # attempts of a sample in which a graph was not captured


class DynoTarget(Target):
    """The engine of this project in a worker process.

    Args:
    model: path of a GGUF file.
    device: `cpu`, `cuda:N`, or `auto`.
    settings: Fixed values by name, which are not searched.
    ctx: Context length, at least what the workload needs.
    scratch: Folder for the logits of the exact path, so that a new worker need not compute them again.
    check_seed: Seed of the passages for the answer check.
    text: File whose passages are the prompts; default: random tokens.
    cache: Folder in which the logits of the exact path are stored for later tunes.
    sequences: Number of sequences of the engine, if no setting gives it.
    virtual_devices, vram, ram: As in `Placing`.
    """

    def __init__(
        self,
        model: str,
        settings: Settings | None = None,
        ctx: int | None = None,
        scratch: str | None = None,
        check_seed: int = 0,
        device: str = "cpu",
        text: str | None = None,
        cache: str | None = None,
        sequences: int = 1,
        virtual_devices: Any = 0,
        vram: int = 0,
        ram: int = 0,
    ) -> None:
        self._path = model
        self._fixed = {name: one_word(value) for name, value in (settings or {}).items()}
        self._scratch = Path(scratch) if scratch else None
        self._cache = Path(cache) if cache else None
        self._session: Any = None
        self._loaded: dict[str, Any] = {}  # settings of the open session
        self._depth: int | None = None  # tokens of context in the cache
        self._filled: object = None  # the checkpoint after them
        self._reference: tuple[list[np.ndarray], list[np.ndarray | None]] | None = None
        self._groups: list[answers.Group] | None = None
        self._check_seed = check_seed
        self._budget: float | None = None  # budget of the run in seconds, which decides how much is scored
        # By group and code: digest of the answers and their score.
        self._scored: dict[Hashable, tuple[bytes, GroupQuality]] = {}
        try:
            self._model: dict[str, Any] = dict(_core.describe_model(model))
            self._placing = Placing(virtual_devices, vram, ram)
            chosen = self._chosen = self._placing.resolve(device)
            self._name = chosen.name
            self._kind = chosen.kind
            self._device: dict[str, Any] = dict(chosen.info)
            self._build: dict[str, Any] = dict(_core.build_info())
        except (DynoError, OSError) as error:
            raise TargetUnusable(str(error)) from error
        limit = int(self._model.get("n_ctx_train") or 4096)
        self._ctx = min(ctx or min(limit, 4096), limit)
        # Of the fixed settings, other defaults depend on these two, as in an engine opened with them.
        threads = self._fixed.get("threads")
        given = DefaultsFor(cores=usable_cores(), latent_cache=has_latent_cache(self._model),
            numerics=str(self._fixed.get("numerics", "default")),
            threads=threads if isinstance(threads, int) else None,
            n_ctx_train=limit, compute_capability=int(self._device.get("compute_capability", 0)),
            dense_quantised=is_dense_quantised(self._model),
            cuda_graphs=bool(engine_defaults().get("cuda_graphs", True)))  # fmt: skip
        self._prompts = Prompts(model, int(self._model["n_vocab"]), text)
        self._kinds = {s.name: s.kind for s in settings_for(self._kind)}
        self._defaults = {s.name: one_word(s.default_value(given)) for s in settings_for(self._kind)}
        self._defaults |= {"ctx": self._ctx, "sequences": sequences}
        try:
            usual = UsualUbatch(model, self._device, self._name, lambda: self._placing.free)
            given_settings = {name: as_list(name, value) for name, value in self._complete({}).items()}
            self._defaults["ubatch"] = usual(given_settings)
            self._placed = self._place()
        except DynoError as error:
            raise TargetUnusable(str(error)) from error
        self._rates: dict[str, float] = {}
        self._counters: _energy.Counters | None = None
        self._meter: PowerMeter | None = None
        self._sample_seconds = SAMPLE_SECONDS

    def _place(self) -> dict[str, Any]:
        """Whether weights are on the CPU in addition to the device. The defaults contain the placement that
        the engine chooses, so that all configurations name the placement of their weights."""
        kinds = {kind: self._of(self._complete({}), kind) for kind in ("load", "context", "session")}
        found = self._placing.usual(self._path, self._chosen, kinds)
        self._defaults |= found.pop("settings")
        return found

    # ---- facts

    def describe(self) -> Description:
        name = {"general.name": _core.Gguf(self._path).get("general.name")}
        device = profiles.device_from_info(self._device)
        model = profiles.model_from_description(self._model, weights=profiles.weights_kind(name))
        engine = profiles.engine_from_build(self._build)
        return Description(
            target="dyno",
            label=label(self._chosen, self._path),
            device=device.model_dump(mode="json", exclude_none=True),
            model={
                **model.model_dump(mode="json", exclude_none=True),
                "n_ctx_train": int(self._model["n_ctx_train"]),
                "latent_cache": has_latent_cache(self._model),
                "file_bytes": os.path.getsize(self._path),
                "expert_use": _expert_use.remembered(_core.Gguf(self._path)) is not None,
            },
            engine={
                **engine.model_dump(mode="json", exclude_none=True),
                "defaults": {**self._defaults, **self._fixed},
                "ctx": self._ctx,
                "text": self._prompts.digest,
                "text_file": self._prompts.source if self._prompts.digest else "",
                "compiler": str(self._build.get("compiler", "")),
                "device_name": str(self._device.get("name", "")),
                **self._gpu_facts(),
                **({**self._placed, "host_cores": usable_cores()} if self._placed["host_weights"] else {}),
                **({"host_nodes": nodes} if (nodes := len(_core.numa_nodes())) > 1 else {}),
            },
            bounds=self._bounds(),
            rates=dict(self._measured_rates()),
            capabilities=self.capabilities(),
            limits=self._placing.limits(self._chosen) if self._placed["host_weights"] else {},
        )

    def capabilities(self) -> Capabilities:
        routed = int(self._model.get("experts") or 0) > 0
        return Capabilities(kernels=True, memory_plan=True, routing=routed)

    def _gpu_facts(self) -> dict[str, Any]:
        """Facts from the driver, and the toolkit of the build."""
        if self._kind != "cuda":
            return {}
        names = ("pci_bus_id", "driver", "power_limit_w", "max_sm_mhz", "pcie_generation", "pcie_lanes")
        told = {name: self._device[name] for name in names if self._device.get(name) is not None}
        return {"gpu": {**told, "cuda": str(self._build["switches"].get("CUDA", ""))}}

    def _measured_rates(self) -> dict[str, float]:
        """The peak rates of the GPU, measured once; empty on a CPU."""
        if self._kind == "cuda" and not self._rates:
            try:
                found = _core.measure_rates(self._name)
            except DynoError as error:
                raise TargetUnusable(str(error)) from error
            self._rates = {
                "memory_gbps": round(found["memory_gbps"], 1),
                "pcie_gbps": round(min(found["host_to_device_gbps"], found["device_to_host_gbps"]), 1),
            }
            if "f16_tflops" in found:  # a build without cuBLAS does not measure it
                self._rates["f16_tflops"] = round(found["f16_tflops"], 1)
        return self._rates

    def _bounds(self) -> dict[str, float]:
        active = bounds.active_parameters(self._model)
        if active <= 0:
            return {}
        if self._kind != "cuda":
            return bounds.of_cpu(self._device, active)
        share = active / max(1.0, float(self._model.get("parameters") or active))
        return bounds.of_gpu(
            self._device, self._measured_rates(), active, share * os.path.getsize(self._path)
        )

    # ---- sessions

    def _complete(self, settings: Settings) -> dict[str, Any]:
        return {**self._defaults, **self._fixed, **settings}

    def _of(self, settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
        return {n: as_list(n, v) for n, v in settings.items() if self._kinds.get(n) == kind}

    def _open(
        self, settings: dict[str, Any], kernels: list[tuple[str, str, dict[str, Any], str]], *,
        exact: bool = False,
    ) -> None:  # fmt: skip
        self._close_session()
        load = self._of(settings, "load")
        self._session = _core.Session(
            self._path,
            load={"device": self._name, **load},
            context=self._of(settings, "context"),
            session=self._of(settings, "session"),
            kernels=kernels,
            placement=self._placing.argument(load if exact else None, limited=not exact)
            | self._expert_use(load),
        )
        self._loaded = settings

    def _expert_use(self, load: Mapping[str, Any]) -> dict[str, Any]:
        return _expert_use.for_session(_core.Gguf(self._path), int(load.get("expert_cache_mib", 0)))

    def _close_session(self) -> None:
        """Close the session, and forget it before that, because it cannot be trusted after a failure."""
        session, self._session = self._session, None
        self._loaded = {}
        self._depth = None
        if session is not None:
            session.close()

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        self._switch(configuration)

    def _switch(self, configuration: Configuration) -> None:
        settings = self._complete(configuration.settings)
        kernels = [(k.key, k.tokens, dict(k.config), "tuner") for k in configuration.kernels]
        # A change of only kernels keeps the cache, because its content only differs by rounding.
        depth = self._depth if self._session is not None and settings == self._loaded else None
        try:
            if self._session is None or self._of(settings, "load") != self._of(self._loaded, "load"):
                self._open(settings, kernels)
            else:
                if self._of(settings, "context") != self._of(self._loaded, "context"):
                    self._session.set_context(self._of(settings, "context"))
                self._session.set_kernels(kernels)
                self._session.set(self._of(settings, "session"))
                self._loaded = settings
            self._depth = depth
            rejected = [r for r in self._session.kernel_report() if r["status"] == "rejected"]
        except DeviceLostError as error:
            raise TargetLost(str(error)) from error
        except (GgufError, ModelError, DeviceError) as error:
            raise TargetUnusable(str(error)) from error
        except (DynoError, MemoryError) as error:
            self._close_session()
            raise _failure(error) from error
        if rejected:
            message = f"kernel {rejected[0]['key']} {rejected[0]['tokens']}: {rejected[0]['reason']}"
            raise TargetFailure(TrialStatus.INVALID, message)

    # ---- routing

    def routing(self, configuration: Configuration, workload: Workload) -> dict[str, Any]:
        """The use of experts in a u-batch of the workload's prompts; empty if there are no experts."""
        experts = int(self._model.get("experts") or 0)
        if not experts:
            return {}
        self._switch(configuration)
        tokens = min(int(self._loaded["ubatch"]), max(workload.prompts, default=64), self._ctx)
        try:
            return measure_routing(self._session, self._prompts, tokens, experts)
        except (DynoError, MemoryError) as error:
            raise _failure(error) from error
        finally:
            self._depth = None

    # ---- memory

    def memory(self, settings: Settings, where: str = "device") -> int | None:
        """Planned bytes, without reading weights."""
        session = self._planned(settings)
        return None if session is None else planned_bytes(session.plan, where)

    def expected(self, settings: Settings, workload: Workload) -> dict[str, float] | None:
        session = self._planned(settings) if workload.served is None else None
        ubatch = int(self._complete(settings)["ubatch"])
        return None if session is None else self._placing.expected(session, self._chosen, workload, ubatch)

    def _planned(self, settings: Settings) -> Any:
        """A session that only plans; None if the engine refuses the settings."""
        complete = self._complete(settings)
        try:
            return _core.Session(
                self._path,
                load={"device": self._name, **self._of(complete, "load")},
                context=self._of(complete, "context"),
                session=self._of(complete, "session"),
                plan_only=True,
                placement=self._placing.argument() | self._expert_use(self._of(complete, "load")),
            )
        except DeviceLostError as error:
            raise TargetLost(str(error)) from error
        except DynoError:
            return None

    # ---- speed

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        """Measure a metric. pp: one prompt, with logits of its last row. tg: random tokens, one by one; on a
        GPU including the draw of a token, as in `dyno bench`.

        Other processes can disturb a run of a few milliseconds. So it is repeated until SAMPLE_SECONDS have
        passed, and the sample is the run of median duration. The load of a server is one run."""
        if workload.served is not None:
            self._depth = None
            load = workload.served
            return serve(self._session, self._loaded, self._prompts, load, metric, prompt, _failure)
        runs: list[tuple[float, float]] = []
        if self._meter is not None:
            self._meter.begin()
        most = SAMPLE_RUNS if self._sample_seconds == SAMPLE_SECONDS else ENERGY_RUNS
        while len(runs) < most and (not runs or sum(s for s, _ in runs) < self._sample_seconds):
            runs.append(self._run(workload, metric, prompt))
        watts = None if self._meter is None else self._meter.watts()
        seconds, clock_seconds = sorted(runs)[(len(runs) - 1) // 2]
        joules = None if watts is None else watts * seconds
        return Sample(metric, prompt, workload.tokens(metric), seconds, clock_seconds, joules)

    def count_energy(self, wanted: str | None) -> str:
        """Count the energy of GPU and CPU, each if its counter can be read."""
        self._meter = None
        self._sample_seconds = ENERGY_SECONDS if wanted == DECIDES else SAMPLE_SECONDS
        if wanted is None:
            self._counters = None
            return ""
        if self._counters is None:
            bus = str(self._device["pci_bus_id"]) if self._kind == "cuda" else None
            counters = _energy.Counters(bus)
            if why := counters.unreadable("gpu" if self._kind == "cuda" else "cpu"):
                return why
            self._counters = counters
        self._meter = PowerMeter(self._counters, decides=wanted == DECIDES)
        return ""

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def _run(self, workload: Workload, metric: str, prompt: int) -> tuple[float, float]:
        """Seconds of one run by two clocks. If a graph was not captured, the run does not represent the
        settings and is repeated."""
        session = self._session
        try:
            for _ in range(_CAPTURE_RUNS):
                failures = int(session.capture_failures)
                found = self._timed(workload, metric, prompt)
                if int(session.capture_failures) == failures:
                    return found
            why = [row["reason"] for row in session.captures() if row["reason"]]
            raise DeviceError(f"[target] a graph was not captured: {'; '.join(why)}")
        except (DynoError, MemoryError) as error:
            raise _failure(error) from error

    def _timed(self, workload: Workload, metric: str, prompt: int) -> tuple[float, float]:
        session = self._session
        count = workload.tokens(metric)
        part = workload.part(metric)
        start = part.depth
        if start and self._depth == start:
            session.rewind(start)
        else:
            session.reset()
            self._depth = None
            if start:
                # The context is the same for all prompts, and only the part after it is timed.
                session.decode([(0, self._prompts.take(start, "depth", 0))], rows="none")
                # Recurrent state can only return to an existing checkpoint.
                self._filled = session.checkpoint(0)
                if part.kind == "tg" and self._kind == "cuda":
                    self._settle(start, count)
            self._depth = start or None
        tokens = self._prompts.take(count, part.kind, prompt)
        on_device = part.kind == "tg" and session.draws_on_device
        pieces = [tokens] if part.kind == "pp" else [tokens[i : i + 1] for i in range(count)]
        # The other clock is read inside. If this process is suspended between two readings, the sample gets
        # longer, but never shorter than the other clock says.
        if self._meter is not None:
            self._meter.run_begins()
        begun = time.perf_counter()
        clock_begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        if on_device:
            greedy_after(session, tokens)
        else:
            for piece in pieces:
                session.decode([(0, piece)], rows="last")
        clock_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - clock_begun
        return time.perf_counter() - begun, clock_seconds

    def _settle(self, depth: int, count: int) -> None:
        """Generate untimed after a context was processed, so that the speed of that does not matter."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < SETTLE_SECONDS:
            for token in self._prompts.take(count, "tg", 0):
                self._session.decode([(0, token.reshape(1))], rows="last")
            self._session.rewind(depth)

    # ---- answers

    def _asked(self) -> list[answers.Group]:
        """The groups of scored tokens: fewer if the exact path is slow or the budget is short."""
        if self._groups is None:
            # The work of ten seconds at two billion operations per second and core (1.7e12 on an H200), or
            # the share of a short budget. It is the same in all runs.
            rate = 2e9 * usable_cores() if self._kind == "cpu" else 1e12
            affordable = answers.affordable(
                rate / (2 * bounds.active_parameters(self._model) + 1), self._budget
            )
            self._groups = answers.groups(
                self._path, total=max(answers.FEWEST, min(answers.MOST, affordable)), ctx=self._ctx,
                largest=CHECK_BATCH, vocabulary=int(self._model["n_vocab"]), seed=self._check_seed,
                once=affordable if self._kind == "cuda" else 0,  # large u-batches pay off there
            )  # fmt: skip
        return self._groups

    def _exact(self) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """Logits and experts of the exact path: f32 throughout, without any knobs."""
        if self._reference is not None:
            return self._reference
        key = self._exact_key()
        file = self._scratch / f"exact{kept_answers.SUFFIX}" if self._scratch and key else None
        found = kept_answers.load(file, key) if file and key else None
        if found is None:
            found = self._exact_anew(key)
            # The caller refuses answers that are not finite, so they are not stored.
            if file and key and not kept_answers.flaw(found, key):
                kept_answers.save(file, key, found)
        self._reference = found
        return found

    def _exact_settings(self) -> dict[str, Any]:
        settings = self._complete({}) | {"numerics": "exact", "kv_type_k": "f32", "kv_type_v": "f32"}
        if "cpu_repack" in settings:
            settings["cpu_repack"] = False
        # Caches in f32 need more memory, so the engine places the weights again, except those that the user
        # has placed.
        neutral = {name: one_word(value) for name, value in NOWHERE_ELSE.items()}
        settings["expert_cache_mib"] = 0  # it would change the computing device
        return settings if ELSEWHERE & self._fixed.keys() else settings | neutral

    def _exact_key(self) -> kept_answers.Key | None:
        """The key of the exact path's answers; None if they are not stored, or a file cannot be read."""
        if self._cache is None and self._scratch is None:
            return None
        facts = {name: self._device.get(name) for name in _COMPUTES} | self._exact_settings()
        layers, experts, used = (
            int(self._model.get(name) or 0) for name in ("moe_layers", "experts", "experts_used")
        )
        with contextlib.suppress(OSError):
            return kept_answers.key_of(
                self._path, self._asked(), _core.__file__, facts,
                vocabulary=int(self._model["n_vocab"]),
                experts=(layers, experts, used) if experts else (0, 0, 0),
            )  # fmt: skip
        return None

    def _exact_anew(self, key: kept_answers.Key | None) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """The answers of the exact path for this tune: stored by an earlier tune, or computed."""
        if self._cache is not None and key is not None:
            found = kept_answers.load(self._cache / key.name, key)
            if found is not None:
                return found
        begun = time.monotonic()
        self._open(self._exact_settings(), [], exact=True)
        computed = answers.exact_answers(
            self._session, self._asked(), capture=bool(self._model.get("experts"))
        )
        self._close_session()
        worth = time.monotonic() - begun >= kept_answers.WORTH_SECONDS
        if self._cache is not None and key is not None and worth and not kept_answers.flaw(computed, key):
            kept_answers.keep(self._cache, key, computed)
        return computed

    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        begun = self.clock()
        try:
            if self._groups is None:
                self._budget = context.budget
            reference, routing = self._exact()
            self._switch(configuration)
            digest = hashlib.sha256()
            found = []
            for group, exact, pinned in zip(self._asked(), reference, routing, strict=True):
                code = (group.name, configuration.kernels_key(), group.code(self._loaded))
                if code not in self._scored:
                    logits = answers.answer(self._session, group, pinned)
                    own = hashlib.sha256(logits.ravel().data).digest()
                    self._scored[code] = (own, answers.score(group, exact, logits))
                digest.update(self._scored[code][0])
                found.append(self._scored[code][1])
            self._depth = None
        except TargetFailure as failure:
            status = TrialStatus(failure.status)
            return Quality(status, message=failure.message, seconds=self.clock() - begun)
        except DeviceLostError as error:
            raise TargetLost(str(error)) from error
        except (OutOfMemoryError, MemoryError) as error:
            return Quality(TrialStatus.OOM, message=str(error), seconds=self.clock() - begun)
        except DynoError as error:
            return Quality(TrialStatus.INVALID, message=str(error), seconds=self.clock() - begun)
        return Quality.of(found, digest.hexdigest()[:32], self.clock() - begun)

    # ---- kernels

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        self._switch(configuration)
        ubatch = int(self._loaded["ubatch"])
        return ops_with_choice(self._session, self._device, self._kind, self._model, workload, ubatch)

    def time_ops(
        self, key: str, m: int, configs: Sequence[Mapping[str, Value]], *, threads: int, seconds: float,
        depth: int = 0,
    ) -> list[list[float]]:  # fmt: skip
        # Virtual devices run on the CPU.
        name, bytes_ = self._name if self._kind == "cuda" else "cpu", os.path.getsize(self._path)
        try:
            return op_times(
                key, m, configs, self._device, name, bytes_, threads=threads, seconds=seconds, depth=depth
            )
        except (DynoError, MemoryError) as error:
            raise _failure(error) from error

    def clock(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        self._close_session()


def _failure(error: Exception) -> TargetFailure | TargetLost:
    """Convert an error of the engine to the error of a trial."""
    if isinstance(error, DeviceLostError):
        return TargetLost(str(error))
    oom = isinstance(error, OutOfMemoryError | MemoryError)
    return TargetFailure(TrialStatus.OOM if oom else TrialStatus.INVALID, str(error))


def from_options(options: Mapping[str, Any]) -> DynoTarget:
    """Make the target in a worker from plain values."""
    return DynoTarget(**options)
