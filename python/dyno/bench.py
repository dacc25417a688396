"""The speed of prompt processing (pp) and generation (tg), measured as in llama-bench.

pp computes only the logits of the last token. tg feeds random tokens one by one. On a GPU, tg does the same
work as generation: the device draws the next token greedily, and the host receives it while the next steps
run. Only the token that is fed is a random one. On a CPU, no token is drawn. With a depth, the context is
filled first, which is not timed. All samples are kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno import _energy
from dyno._bench_formats import human_count
from dyno.engine import Engine
from dyno.errors import PlanError
from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["BenchCase", "BenchResult", "cases", "machine_facts", "model_facts", "run"]

_WARM_UP_TOLERANCE = 0.05
_WARM_UP_RUNS = 4
# Shortest warm-up of generation. A GPU that has just processed prompts generates more slowly for about as
# long as that took (on an H200 by 2 % at first, and by 0.3 % after half a second).
_GENERATION_SECONDS = 0.5


@dataclass(frozen=True)
class BenchCase:
    """One test of a benchmark: a line of the table."""

    n_prompt: int
    """Prompt length in tokens; 0 in a test of generation only."""
    n_gen: int
    """Number of generated tokens; 0 in a test of the prompt only."""
    depth: int = 0
    """Number of tokens in the context before the test."""
    batch: int = 2048
    """Most tokens per call of the engine."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings of this case by name."""

    @property
    def test(self) -> str:
        """`pp512`, `tg64`, `pp512+tg64`, with `@ d1024` for a depth."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """Number of tokens that are timed."""
        return self.n_prompt + self.n_gen

    @property
    def positions(self) -> int:
        """Context length in tokens that the case needs."""
        return self.depth + self.tokens


@dataclass(frozen=True)
class BenchResult:
    """The samples of one case."""

    case: BenchCase
    samples_ns: list[int]
    """Wall-clock time of each repetition in nanoseconds."""
    settings: dict[str, Any]
    """All settings in force."""
    warm_up_runs: int
    time: str
    """Time of the measurement in UTC, ISO 8601."""
    energy: dict[str, dict[str, float]] = field(default_factory=dict)
    """`joules_per_token` and `watts` by source (`cpu`, `gpu`) that could be read. Both include idle power."""
    expert_choices: dict[str, int] = field(default_factory=dict)
    """Expert choices during the samples, in layers with an expert cache: the number `chosen`, the number of
    those that were `cached`, and the number of `swapped` experts if the cache adapts."""
    samples_ts: list[float] = field(init=False)
    """Tokens per second of every repetition."""

    def __post_init__(self) -> None:
        rates = [self.case.tokens * 1e9 / ns for ns in self.samples_ns]
        object.__setattr__(self, "samples_ts", rates)

    @property
    def avg_ts(self) -> float:
        """Mean tokens per second."""
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        """Standard deviation of the tokens per second; 0 for one sample."""
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0


def cases(
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int],
    batches: Sequence[int],
    settings: dict[str, Sequence[Any]],
) -> list[BenchCase]:
    """The grid of cases: each combination of settings, batch and depth with each pp, tg and pp+tg test.

    Raises:
        PlanError: There is nothing to measure, or a number is impossible.
    """
    for name, values, least in (
        ("-p", n_prompt, 0),
        ("-n", n_gen, 0),
        ("-d", depths, 0),
        ("-b", batches, 1),
        ("-pg", [x for pair in pairs for x in pair], 0),
    ):
        bad = [v for v in values if v < least]
        if bad:
            raise PlanError(f"[bench] {name} must be at least {least}, not {bad[0]}")
    tests = [(p, 0) for p in n_prompt if p] + [(0, n) for n in n_gen if n]
    tests += [pair for pair in pairs if any(pair)]
    if not tests:
        raise PlanError("[bench] there is nothing to measure; give a number above 0 with -p, -n or -pg")
    grid = []
    for values in itertools.product(*settings.values()):
        chosen = tuple(zip(settings, values, strict=True))
        for batch, depth in itertools.product(batches, depths):
            grid += [BenchCase(p, n, depth, batch, chosen) for p, n in tests]
    return grid


def run(
    path: str,
    grid: Iterable[BenchCase],
    *,
    repetitions: int = 5,
    seed: int = 0,
    warm_up: bool = True,
    on_step: Callable[[str], None] | None = None,
    on_open: Callable[[Engine], None] | None = None,
    **engine_arguments: Any,
) -> Iterator[BenchResult]:
    """Measure all cases in turn. The model is loaded again only if a case needs it.

    Args:
        path: GGUF file.
        grid: The cases.
        repetitions: Number of samples per case.
        seed: Seed of the random tokens.
        warm_up: Repeat a case untimed until two runs agree within 5 %, at most 4 times. Generation is also
            repeated for half a second, because the previous case may have processed prompts.
        on_step: Called with a note before each step that takes a while.
        on_open: Called with each engine that is opened.
        **engine_arguments: For `Engine`: device, profile and settings that hold for all cases.

    Raises:
        PlanError: A case does not fit the model, or a setting is wrong.
    """
    if repetitions < 1:
        raise PlanError(f"[bench] repetitions must be at least 1, not {repetitions}")
    todo = list(grid)
    notify = on_step or (lambda note: None)
    # The engine refuses unknown names, and suggests the most similar one.
    opened_with = {"ctx": max((case.positions for case in todo), default=1)}
    for load, group in itertools.groupby(todo, key=lambda case: _of_kind(case, "load", "build", "")):
        notify("opening the model")
        with Engine(path, **{**opened_with, **engine_arguments, **load}) as engine:
            if on_open is not None:
                on_open(engine)
            for case in group:
                context, session = _of_kind(case, "context"), _of_kind(case, "session")
                if any(engine.settings[name] != value for name, value in context.items()):
                    engine.set_context(**context)
                if session:
                    engine.set(**session)
                yield _measure(engine, case, repetitions, seed, warm_up, notify)


def _of_kind(case: BenchCase, *kinds: str) -> dict[str, Any]:
    """The settings of a case that have one of these kinds. An unknown name has the kind ''."""
    return {k: v for k, v in case.settings if (SETTINGS[k].kind if k in SETTINGS else "") in kinds}


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    """The build and the machine of a record, with the key names of llama-bench.

    Args:
        device: As for `Engine`.

    Raises:
        DeviceError: No such device.
    """
    from dyno import _core
    from dyno.devices import resolve_device

    build, cpu = _core.build_info(), _core.cpu_info()
    chosen = resolve_device("cpu" if device.startswith("cpu:") else device)  # a virtual device is the CPU
    gpu = chosen.kind == "cuda"
    facts = {
        "build_version": build["version"],
        "build_info": build,
        "cpu_info": cpu["name"],
        "gpu_info": chosen.info["name"] if gpu else "",
        "backends": "CUDA" if gpu else "CPU",
    }
    if gpu:
        names = ("driver", "power_limit_w", "compute_capability", "sm_count", "memory_bytes")
        facts["gpu"] = {name: chosen.info[name] for name in names if chosen.info.get(name) is not None}
    return facts


def model_facts(path: str) -> dict[str, Any]:
    """The model of a record, with the key names of llama-bench."""
    from dyno import _core

    model = _core.describe_model(path)
    size = sum(int(t["nbytes"]) for t in _core.Gguf(path).tensors())
    main_type = max(model["types"], key=lambda name: model["types"][name])
    count = human_count(model["parameters"]).replace(" ", "")
    return {
        "model_filename": path,
        "model_type": f"{model['architecture']} {count} {main_type.upper()}",
        "model_size": size,
        "model_n_params": int(model["parameters"]),
    }


def _measure(
    engine: Engine, case: BenchCase, repetitions: int, seed: int, warm_up: bool, notify: Callable[[str], None]
) -> BenchResult:
    random = np.random.default_rng(seed)
    engine.reset()  # tokens of an earlier case must not count as the depth of this one
    tokens = random.integers(0, int(engine.model["n_vocab"]), size=case.positions, dtype=np.int32)
    runs = _warm_up(engine, case, tokens, notify) if warm_up else 0
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    counters = _energy.Counters(engine.device_info.get("pci_bus_id"), _energy.POWERCAP)
    samples, joules = [], dict.fromkeys(counters.sources, 0.0)
    choices = engine.expert_choices
    for i in range(repetitions):
        notify(f"{case.test} {i + 1}/{repetitions}")
        before = counters.read()
        samples.append(_once(engine, case, tokens))
        for source, spent in counters.spent(before, counters.read()).items():
            joules[source] += spent
    if case.depth and not runs:
        joules = {}  # the first run also filled the context, which was not timed
    chosen = {name: count - choices[name] for name, count in engine.expert_choices.items()}
    return BenchResult(
        case, samples, dict(engine.settings), runs, stamp, _per_token(case, samples, joules),
        chosen if chosen["chosen"] else {},
    )  # fmt: skip


def _per_token(
    case: BenchCase, samples: Sequence[int], joules: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Convert joules by source to joules per token and mean power over the samples."""
    tokens, seconds = case.tokens * len(samples), sum(samples) / 1e9
    return {
        source: {"joules_per_token": total / tokens, "watts": total / seconds}
        for source, total in joules.items()
    }


def _warm_up(
    engine: Engine, case: BenchCase, tokens: NDArray[np.int32], notify: Callable[[str], None]
) -> int:
    """Run until two runs agree, so that pages are mapped, caches are warm and clocks are up. Returns the
    number of runs."""
    # A few generated tokens are enough to see the state of the machine.
    short = replace(case, n_gen=min(case.n_gen, 16)) if not case.n_prompt else case
    least = 0 if case.n_prompt else int(_GENERATION_SECONDS * 1e9)
    before = spent = runs = 0
    while True:
        notify(f"{case.test} warm-up")
        now = _once(engine, short, tokens)
        spent, runs = spent + now, runs + 1
        settled = before and abs(now - before) <= _WARM_UP_TOLERANCE * before
        if (settled or runs >= _WARM_UP_RUNS) and spent >= least:
            return runs
        before = now


def _once(engine: Engine, case: BenchCase, tokens: NDArray[np.int32]) -> int:
    """Duration of one run in nanoseconds."""
    if case.depth and engine.position() >= case.depth and engine._open().rewindable(case.depth) == case.depth:
        engine.rewind(case.depth)  # the filled context stays, because it is the same for each run
    else:  # recurrent state and layers that keep only a window cannot be rewound to it
        engine.reset()
        # Reading the logits of the last row waits for the filling. Otherwise a GPU would still be at work
        # when timing starts.
        _feed(engine, tokens[: case.depth], case.batch, last_row=True)
    prompt = tokens[case.depth : case.depth + case.n_prompt]
    generated = tokens[case.depth + case.n_prompt : case.positions]
    start = time.perf_counter_ns()
    _feed(engine, prompt, case.batch, last_row=True)
    if engine.diagnostics.draws_on_device and len(generated):
        engine.diagnostics.greedy_after(generated)
    else:
        for token in generated.reshape(-1, 1):
            engine.logits(token, reset=False, rows="last")
    return time.perf_counter_ns() - start


def _feed(engine: Engine, tokens: NDArray[np.int32], batch: int, *, last_row: bool) -> None:
    for start in range(0, len(tokens), batch):
        is_last = start + batch >= len(tokens)
        engine.logits(
            tokens[start : start + batch], reset=False, rows="last" if last_row and is_last else "none"
        )
