"""A tuning session on an engine, from the options of the command line to the profile on disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import os
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno.errors import ProfileError
from dyno.settings import SETTINGS

from .. import __version__
from ..core.errors import DisturbedError, Interrupted, TuneError
from ..core.machine_match import device_of, differences, engine_of, match_of, model_of, versions_of
from ..core.options import MEMORY, SPEED
from ..core.protocol import Switch
from ..core.scratch import scratch_folder
from ..decide.pareto import Variant, least_memory, nothing_saved, trade_memory
from ..execution.device_pool import DevicePool, PoolMember
from ..execution.worker import WorkerExecutor
from ..measure.environment import Surroundings, look_around
from ..measure.machine_monitor import Machine, patience_of
from ..output import replacement
from ..output.emit import Made, comments_of, incumbent_settings, profile_of
from ..output.progress import Progress
from ..output.verdict import only_quiet, record_of, verdict
from ..record import journal, validation
from ..record.recorder import Recorder
from ..search.shared_study import Study, check_storage
from ..space.memory_limits import MemoryLimit, NearMiss
from ..space.search_space import Space
from ..targets import declared
from ..targets.declaration import TargetRequest
from .continuation import FORMAT, open_journal
from .order import ordered
from .pareto_files import write_front
from .tune import Options, Tune

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..core.executor import Executor
    from ..core.outcome import Outcome
    from ..core.protocol import Description, Settings, Value

_TO_REST = "Stop these programs and continue with --resume, or measure anyway with --force"


@dataclass
class Request:
    """The request of the user for a tune."""

    model: str
    options: Options
    device: str = "cpu"
    others: tuple[str, ...] = ()  # further devices of the same kind, which screen in parallel with the first
    out: Path | None = None
    resume: bool = False
    ctx: int | None = None  # default: 4096 or what the workload needs, up to the limit of the model
    storage: str | None = None  # URL of an Optuna storage
    study: str | None = None  # name of the study; default: from the model and the workload
    command: str = ""
    quiet: bool = False
    held: dict[str, Any] = field(default_factory=dict)  # settings that the user has fixed
    deadline_floor: float = 6.0  # least deadline of a trial in seconds
    engine: str = "dyno"
    engine_options: dict[str, Any] = field(default_factory=dict)  # options for the target of another engine
    text: str | None = None  # file with the text of the prompts
    memory_limit: int | None = None  # limit of the planned bytes
    force: bool = False  # measure even while other programs use the CPUs
    placement: dict[str, Any] = field(default_factory=dict)  # dyno: virtual_devices, vram and ram (bytes)
    first: tuple[dict[str, Any], ...] = ()  # settings that race first
    slice: dict[str, Any] | None = None  # slice of the model on which an earlier tune found them


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    profile: profiles.Profile
    path: Path | None
    """The file of the profile; None if none was written, because the tune has judged nothing, or because the
    slice of `--layers` had nothing to confirm."""
    journal: Path
    pareto: Path | None = None  # folder with the profiles of less memory, and the plot
    why_none: str = ""  # without a file: the reason, and how to continue

    @property
    def proves_nothing(self) -> bool:
        """Whether the tune has judged no setting, or has no file because settings looked faster on a slice
        but were not proven there. A win of the defaults is a proof."""
        return self.outcome.judges_nothing or (self.path is None and self.outcome.unproven)


def space_for(description: Description, request: Request) -> Space:
    """The knobs of the table that apply to this engine, device, model and workload."""
    target = declared(request.engine)
    approx = request.options.approx_limit is not None
    knobs = target.knobs(description, request.options.workload, approx=approx, held=request.held)
    return Space(knobs, target.legal(description))


def limit_memory(
    description: Description, request: Request, executor: Executor, space: Space
) -> tuple[Space, list[NearMiss]]:
    """The space without values that do not fit by the plan, and the near misses. Raises TuneError if the
    default does not fit."""
    limits = dict(description.limits)
    if request.memory_limit is not None:
        limits["device"] = min(request.memory_limit, limits.get("device", request.memory_limit))
    if not limits:
        return space, []
    defaults = _planned_defaults(description)
    longest = request.options.workload.longest
    names = _planned_names(defaults)
    widest: dict[str, Value] = {n: True for n in names if n.startswith("op_offload.")}  # copies need memory
    misses: list[NearMiss] = []
    kept: list[MemoryLimit] = []
    for where, most in limits.items():
        limit = MemoryLimit(most, functools.partial(executor.memory, where=where), names, widest)
        limit.check_default(defaults, longest)
        misses += limit.near_misses(space.knobs, defaults, longest)
        kept.append(limit)

    def fits(settings: Settings) -> bool:
        complete = {**defaults, **settings}
        return space.allowed(settings) and all(limit.allows(complete) for limit in kept)

    return Space(space.knobs, fits, space.fixed), misses


def _planned_defaults(description: Description) -> dict[str, Any]:
    """The settings for the memory plan, unless a point sets them otherwise."""
    return {"ctx": description.engine["ctx"], **description.engine["defaults"]}


def _planned_names(defaults: Mapping[str, Any]) -> list[str]:
    """The settings that memory depends on."""
    # A path that dequantises needs memory for that. So do copies of weights on the CPU, and rows of shared
    # experts.
    paths = ("ctx", "mmq_max_tokens", "mmq_id_max_tokens", "cpu_share")
    return [
        n for n in defaults
        if n in paths or n.startswith("op_offload.") or "memory" in SETTINGS[n].moves
    ]  # fmt: skip


def header(description: Description, request: Request, space: Space, out: Path) -> dict[str, Any]:
    """The first record of a journal: the facts that a run must share to continue it."""
    options = request.options
    return {
        "run": FORMAT,
        "id": uuid.uuid4().hex,  # connects the journals of several devices
        "tuner": __version__,
        "label": description.label,
        "identity": description.identity(),
        "workload": options.workload.to_dict(),
        "seed": options.seed,
        "sampler": options.sampler,
        "approx_limit": options.approx_limit,
        "objective": options.objective,
        "memory_limit": request.memory_limit,
        "budget": options.budget,  # a run with a longer budget may continue it, with the same answer checks
        "devices": 1 + len(request.others),
        "knobs": {k.name: list(k.values) for k in space.knobs},
        "held": request.held,
        "incumbents": incumbents(description, out),
    }


def output_path(request: Request, description: Description) -> Path:
    if request.out is not None:
        return request.out
    return profiles.default_path(device_of(description, {}), model_of(description), engine_of(description))


def incumbents(description: Description, out: Path) -> list[dict[str, Any]]:
    """The settings that race first: from the profile that this run would replace, and from the best match.

    The profile of another model may race, too, because here a measurement decides, unlike in the runtime.
    """
    found: list[dict[str, Any]] = [dict(description.engine.get("incumbent") or {})]
    if out.exists():
        # An unreadable profile will be replaced, and its content cannot be used.
        with contextlib.suppress(ProfileError):
            found.append(incumbent_settings(profiles.load_profile(out)))
    try:
        match = profiles.find_profile(
            device_of(description, {}), model_of(description), engine_of(description), any_model=True
        )
    except ProfileError:
        return [s for s in found if s]
    if match.profile is not None:
        found.append(incumbent_settings(match.profile))
    return [s for s in found if s]


def run(
    request: Request, executor: Executor | None = None, space: Space | None = None,
    others: Sequence[Executor] = (),
) -> Result:  # fmt: skip
    """Tune, and write the profile. Raises TuneError (one line for people) if nothing could be done.

    Args:
        executor: The engine; default: a worker process for each device of the request.
        space: The search space; default: the applicable knobs of the table.
        others: With `executor`: the executors of further devices.
    """
    if request.storage is not None and not request.resume:  # the journal has the answers of the storage
        check_storage(request.storage)
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder("dyno-tune-"))
        except OSError as error:
            raise TuneError(
                f"no folder for temporary files can be created in {tempfile.gettempdir()}: {error.strerror}; "
                "make room there or set TMPDIR"
            ) from error
        if executor is None:
            devices = (request.device, *request.others)
            executor, *others = [WorkerExecutor(*target_of(request, d, scratch)) for d in devices]
            for one in (executor, *others):
                stack.callback(one.close)
        if len(others) != len(request.others):
            request = dataclasses.replace(request, others=("",) * len(others))
        return _run(request, executor, space, others)


def target_of(request: Request, device: str, scratch: str | None) -> tuple[str, dict[str, Any]]:
    """Name and options of the target in a worker."""
    asked = TargetRequest(
        os.path.abspath(request.model), device, request.options.workload.longest, request.ctx, request.held,
        scratch, request.text, stderr_log(request), request.engine_options,
        served=request.options.workload.served is not None, placement=request.placement,
    )  # fmt: skip
    return request.engine.replace(".", "_"), declared(request.engine).worker_options(asked)


def stderr_log(request: Request) -> str:
    """The file for standard error: next to the profile. Without `--out`, the name of the profile is not known
    yet, so it is named after the model, in the folder of the profiles."""
    name = f"{request.engine}-{os.path.basename(request.model)}"
    return f"{os.path.abspath(request.out or profiles.user_folder() / name)}.stderr.log"


def _run(request: Request, executor: Executor, space: Space | None, others: Sequence[Executor]) -> Result:
    description = executor.describe()
    companions = describe_all(others)
    check_companions(description, companions, request)
    check_context(description, request)
    can = description.capabilities
    space, misses = limit_memory(description, request, executor, space or space_for(description, request))
    out = output_path(request, description)
    check_place(out)
    options = request.options
    options = dataclasses.replace(
        options, routing=options.routing or can.routing, apart=options.apart and can.switch is Switch.CALL,
        check=options.check and can.answers,
    )  # fmt: skip
    head = header(description, request, space, out)
    with (
        Progress(
            description.label, options.budget, defaults=space.settings(space.default), quiet=request.quiet
        ) as progress,
        contextlib.ExitStack() as held,
    ):
        book, past, head = open_journal(journal.of_profile(out), head, request.resume, progress)
        held.enter_context(book)
        begun_with = head.get("budget")  # None in older journals
        recorder = _recorder(executor, description, request, space, book, past, progress, held, begun_with)
        members = [PoolMember(0, request.device, recorder)]
        for number, (other, one) in enumerate(zip(others, companions, strict=True), 1):
            path = journal.of_device(book.path, number)
            its, its_past, _ = open_journal(path, {**head, "device": number}, request.resume, progress)
            held.enter_context(its)
            of_it = _recorder(other, one, request, space, its, its_past, progress, held, begun_with)
            members.append(PoolMember(number, _name(request, number), of_it))
        pool = DevicePool(members) if others else None
        if pool is not None:
            progress.say(f"{len(pool)} devices search together; the result is confirmed on {request.device}")
        for line in declared(request.engine).left_out(description, approx=options.approx_limit is not None):
            progress.say(line)
        for miss in misses:
            progress.say(str(miss))
            recorder.note("near_miss", name=miss.name, value=miss.value, short=miss.short, message=str(miss))
        if not any(r.get("note") == "outcome" for r in past):  # otherwise nothing is left to measure
            begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            recorder.note("begun", date=begun)
        if request.command:
            recorder.note("request", command=request.command, label=description.label)
        operations = [r for r in past if "op" in r]
        if operations:
            progress.resumed(max(float(r["t"]) for r in operations), len(operations))
        shared = _join(request, description, space, recorder, progress, held)
        rates = dict(description.rates)
        if not description.virtual_time:
            rates |= _note_machine(request, description, executor, recorder, progress)
        first = ordered(executor, space, options.workload) if can.memory_plan else []
        if first:
            recorder.note("ordered", by="cost model", settings=first)
        racing = [*request.first, *head["incumbents"], *first]
        tune = Tune(recorder, space, options, incumbents=racing, shared=shared, pool=pool)
        with validation.fitting(book.path, lambda: "" if recorder.performed else recorder.last):
            outcome = tune.run()
        outcome, variants = _with_less_memory(tune, outcome, executor, description, progress)
        for number in range(1, 1 + len(others)):
            path = journal.of_device(book.path, number)
            recorder.note("device_journal", device=number, path=path.name, sha256=journal.sha256(path))
        if outcome.status != "interrupted":
            recorder.note("outcome", **record_of(outcome))
    made = Made(
        options.workload, options.seed, request.command, journal.sha256(book.path),
        os.path.basename(request.model), datetime.datetime.now(datetime.UTC).date(), request.slice,
    )  # fmt: skip
    profile = profile_of(outcome, description, made, rates)
    proven = bool(outcome.entries or outcome.kernels)
    if tune.disturbance and not proven:
        raise DisturbedError(f"{tune.disturbance}; nothing had been proven yet. {_TO_REST}")
    left = f"{out} is unchanged" if out.exists() else "no profile was written"
    if outcome.status == "interrupted" and not proven and (outcome.judges_nothing or out.exists()):
        raise Interrupted(
            f"interrupted before anything was proven; {left}, continue with --resume. Journal: {book.path}"
        )
    if outcome.judges_nothing:
        folder = write_front(tune, variants, description, made, rates, out, book.path, progress)
        return Result(outcome, profile, None, book.path, folder, f"{left}{judged_nothing(outcome)}")
    try:
        comments = comments_of(profile, verdict(outcome))
        written = replacement.write(profile, out, book.path.read_bytes(), comments)
    except (OSError, ProfileError) as error:
        raise TuneError(
            f"{error}; all measurements are in {book.path}; free disk space and continue with --resume"
        ) from error
    if written.line:
        progress.say(written.line)
    folder = write_front(tune, variants, description, made, rates, out, written.path, progress)
    if tune.disturbance:
        raise DisturbedError(
            f"{tune.disturbance}; {written.path} holds the entries that were proven before. {_TO_REST}"
        )
    return Result(outcome, profile, written.path, book.path, folder)


def judged_nothing(outcome: Outcome, *, resumes: bool = True) -> str:
    """The reason why a tune has written no file, and how to continue.

    An empty profile would match exactly, so the runtime would prefer it to a proven one of the site.

    Args:
        resumes: Whether `--resume` can continue the tune.
    """
    needed = [p["needed"] for p in (outcome.too_short, *outcome.promises) if "needed" in p]
    if needed:
        remedy = f"; {'continue with --resume' if resumes else 'give'} --budget {needed[0]}s"
    elif only_quiet(outcome):
        remedy = "; tune again on a quieter machine"
    elif outcome.status == "budget" and not (outcome.unanswered or outcome.unanswered_kernels):
        remedy = f"; {'continue with --resume and' if resumes else 'give'} a longer --budget"
    else:
        remedy = ""
    return f", because this tune judged no setting{remedy}"


def _with_less_memory(
    tune: Tune, outcome: Outcome, executor: Executor, description: Description, progress: Progress
) -> tuple[Outcome, list[Variant]]:
    """The outcome and the variants of `--pareto`. If memory decides, the outcome is the smallest of them."""
    options, variants = tune.options, list[Variant]()
    if options.pareto and outcome.status != "interrupted":
        given = _planned_defaults(description)
        plan = MemoryLimit(sys.maxsize, executor.memory, _planned_names(given))  # computes each plan once

        def needs(settings: Mapping[str, Value]) -> int | None:
            return plan.needs({**given, **settings})

        try:
            variants, why = trade_memory(tune, needs)
        except (
            KeyboardInterrupt,
            DisturbedError,
        ) as error:  # proven entries of the tune are written
            outcome.finished = outcome.status
            outcome.status, why = "interrupted", "interrupted; --resume continues it"
            outcome.afterwards = "--pareto was interrupted; --resume continues it."
            tune.disturbance = str(error)
        if why:
            progress.say(f"{'--objective memory' if options.objective == MEMORY else '--pareto'}: {why}")
        if options.objective == MEMORY and outcome.status != "interrupted":
            outcome = least_memory(tune, variants, needs)
    if options.objective == MEMORY and outcome.status == "interrupted":
        # All earlier proofs and judgements are about speed, and not about memory.
        outcome = dataclasses.replace(nothing_saved(outcome), unproven=True)
    return outcome, variants


def _recorder(
    executor: Executor, description: Description, request: Request, space: Space, book: journal.Journal,
    past: list[dict[str, Any]], progress: Progress, held: contextlib.ExitStack, begun_with: float | None,
) -> Recorder:  # fmt: skip
    validation.check_resumable(book.path, past, space.identity)
    bus = (description.engine.get("gpu") or {}).get("pci_bus_id")
    watch = executor.watch(bus)
    if watch is None and not description.virtual_time:
        watch = Machine(bus, host_weights=bool(description.limits))
    recorder = Recorder(
        executor, request.options.workload, journal=book, past=past, identity=space.identity,
        bounds=request.options.workload.bounds(description.bounds), virtual_time=description.virtual_time,
        deadline_floor=request.deadline_floor,
        watch=held.enter_context(watch) if watch is not None else None,
        patience=None if request.force else patience_of(request.options.budget),
        rests=description.capabilities.rests, budget=request.options.budget,
        begun_with=begun_with,
    )  # fmt: skip
    recorder.on_note = progress.note
    return recorder


def describe_all(executors: Sequence[Executor]) -> list[Description]:
    """The descriptions of all executors, in parallel, because a start takes seconds."""
    if not executors:
        return []
    with concurrent.futures.ThreadPoolExecutor(len(executors)) as pool:
        return list(pool.map(lambda executor: executor.describe(), executors))


def _name(request: Request, number: int) -> str:
    """The name of a device in messages; 0 is the first."""
    return (request.device, *request.others)[number] or f"device {number + 1}"


def check_companions(first: Description, others: Sequence[Description], request: Request) -> None:
    """Raises TuneError unless all devices are of one kind, because results of one device must hold for the
    others."""
    for number, other in enumerate(others, 1):
        differs = differences(match_of(first), other)
        if differs:
            raise TuneError(
                f"{_name(request, number)} is another kind of device than {_name(request, 0)}: "
                f"{'; '.join(differs)}; tune them one by one"
            )


def check_context(description: Description, request: Request) -> None:
    """Raises TuneError if the model does not support the requested context, or the context that the workload
    needs."""
    if not description.engine.get("ctx"):
        return
    there, longest = int(description.engine["ctx"]), request.options.workload.longest
    if request.ctx is not None and there < request.ctx:
        raise TuneError(f"--ctx {request.ctx}: the model's limit is a context of {there} tokens")
    held = int(request.held.get("ctx") or there)
    if longest > held:
        what = f"workload {request.options.workload}: it needs a context of {longest} tokens"
        if held == request.held.get("ctx") or there == request.ctx:
            raise TuneError(f"{what}, but the given context holds {held}; give a longer one")
        raise TuneError(f"{what}, and the model's limit is {there}; give a shorter one")


def _join(
    request: Request, description: Description, space: Space, recorder: Recorder, progress: Progress,
    held: contextlib.ExitStack,
) -> Study | None:  # fmt: skip
    """Join the study in the user's storage, which other machines of the same kind may also use."""
    if request.storage is None:
        return None
    options = request.options
    name = request.study or f"{os.path.basename(request.model)} {options.workload}"
    study = Study(request.storage, name, space.for_metrics(options.workload.metrics), recorder)
    held.callback(study.close)
    terms = {
        "workload": options.workload.to_dict(), "knobs": {k.name: list(k.values) for k in space.knobs},
        "held": request.held, "approx_limit": options.approx_limit,
        **({"objective": options.objective} if options.objective != SPEED else {}),
        "text": description.engine.get("text") or "", "versions": versions_of(description),
    }  # fmt: skip
    study.join(description, terms)

    def release() -> None:
        failed = study.release()
        if failed:
            progress.say(failed)

    held.callback(release)
    known = len(study.trials(space))
    recorder.note("joined", study=name, others=study.others, known=known)
    progress.say(
        f"study {name!r}: {known} trial{'s' if known != 1 else ''} of {study.others} other "
        f"tune{'s' if study.others != 1 else ''} known"
        if study.others
        else f"study {name!r}: this is the first tune"
    )
    return study


def _note_machine(
    request: Request, description: Description, executor: Executor, recorder: Recorder, progress: Progress
) -> dict[str, float]:
    """Record the state of the machine, report possible disturbances, and return the measured rates (GB/s)."""
    there = executor.look_around(request.model, description)
    seen: Surroundings = look_around(request.model, description) if there is None else there
    # Without --force, disturbed measurements do not count, and their cause is reported then.
    for line in [seen.busy, *seen.warnings] if request.force and seen.busy else seen.warnings:
        progress.say(line)
    gpu = description.engine.get("gpu") or {}
    rates = {**description.rates, **seen.rates}
    progress.say("measured: " + ", ".join(_rate(name, rates[name]) for name in sorted(rates)))
    recorder.note("machine", **seen.state, **{**description.rates, **seen.rates}, **gpu, **seen.gpu)
    return seen.rates


def _rate(name: str, value: float) -> str:
    """A rate in words, such as `memory 4.9 GB/s` for `memory_gbps`."""
    what, _, unit = name.rpartition("_")
    units = {"gbps": "GB/s", "tflops": "TFLOP/s"}
    return f"{what.replace('_', ' ')} {value:g} {units.get(unit, unit)}"


def check_place(out: Path) -> None:
    """Check that a profile can be written, before minutes of measuring. This creates its folder.

    Raises:
        TuneError: No file can be written there.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuneError(f"the profile's folder {out.parent} cannot be made: {error.strerror}") from error
    if out.is_dir():
        raise TuneError(f"{out} is a folder; name a file with --out")
    if not os.access(out.parent, os.W_OK):
        raise TuneError(f"the profile's folder {out.parent} is not writable; give another place with --out")
