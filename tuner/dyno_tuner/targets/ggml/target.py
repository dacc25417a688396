"""The binaries of llama.cpp and ik_llama.cpp as targets: every measurement is a llama-bench process of its
own.

The settings are read back from the results by key. If they differ, the trial has failed. `llama_cpp` and
`ik_llama_cpp` are the entry points.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import _core, _energy, _nvml

from ...core.errors import TargetFailure, TargetUnusable, TuneError
from ...core.options import DECIDES
from ...core.protocol import (
    Capabilities,
    Configuration,
    Description,
    OpContext,
    Quality,
    Sample,
    Switch,
    Target,
    TrialStatus,
    Value,
    Workload,
)
from ...measure.served_limits import check_limits
from ..dyno.prompts import Prompts, served_prompts
from . import applicability, rate_limits, server
from .applicability import Here
from .command_line import Command, parse_command, same_model
from .device import cpu_device, cuda_device, gpu_facts, model_identity
from .energy import Readings
from .help import Help
from .installation import Installation
from .process import Finished, bench_rows, execute, judge
from .process_log import RunLog
from .quality import CHUNKS, CONTEXT, complete, parse_kld, write_text
from .spelling import NoSpelling, spell
from .sweep_bench import sweep
from .wall_clock import CLOCK_SKEW, Claim, Walls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dyno._energy import Counters

    from ...core.serve_load import ServedLoad

# llama-perplexity of llama.cpp prints from a thread that may be cut off when the process exits. On a busy
# machine a third of its successful runs lost their statistics.
_ATTEMPTS = 8
_REPETITIONS = 4  # one cold prompt and three warm ones
_READ_BACK = {"ubatch": "n_ubatch", "flash_attention": "flash_attn"}


class GgmlTarget(Target):
    """The binaries of llama.cpp or ik_llama.cpp; each measurement is a process.

    Args:
    engine: "llama.cpp" or "ik_llama.cpp".
    model: path of a GGUF file.
    binaries: folder of the engine's binaries.
    gpu: number of the GPU as in nvidia-smi, or several; None: CPU only.
    command: the user's command line, if any.
    settings: fixed values, by name.
    text: file with the text on which answers are compared.
    scratch: folder for the reference's logits.
    deadline: time limit of one process, in seconds.
    log: file for the standard error of all processes.
    served: whether llama-server is measured under load.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        binaries: str,
        gpu: int | Sequence[int] | None = None,
        command: Sequence[str] = (),
        settings: Mapping[str, Value] | None = None,
        text: str | None = None,
        scratch: str | None = None,
        deadline: float = 600.0,
        log: str | None = None,
        served: bool = False,
    ) -> None:
        self._path = model
        self._deadline = deadline
        self._install = Installation(binaries, engine)
        self._engine = engine
        self._model = model_identity(model)
        self._gpus = () if gpu is None else (gpu,) if isinstance(gpu, int) else tuple(gpu)
        self._device, self._device_name = cuda_device(self._gpus[0]) if self._gpus else (cpu_device(), "CPU")
        self._gpu_facts = gpu_facts(self._gpus[0]) if self._gpus else {}
        self._log = RunLog(log)
        self._version = self._install.version(model)
        self._command = self._read_command(command, served=served)
        self._layers_on_gpu()
        self._cores = int(cpu_device()["cores"])
        offloads = engine == "ik_llama.cpp" and bool(self._gpus) and self._command.host_weights
        ids = applicability.find_op_ids(self._install, model, wanted=offloads)
        self._op_ids = {} if isinstance(ids, str) else dict(ids)
        self._read_policy(ids)
        here = Here(
            self._install, self._device, self._model, self._command.host_weights, len(self._gpus) or 1,
            self._command.base, frozenset(self._command.carried), ids,
        )  # fmt: skip
        self._refused = applicability.refusals(here)
        self._defaults = applicability.defaults(here, self._cores)
        if served:
            if self._install.tool("llama-server") is None:
                raise TargetUnusable(
                    f"{self._install.folder} has no llama-server, which --workload serve needs"
                )
            flags = self._install.help_of("llama-server") or Help()
            self._defaults |= server.own_defaults(flags, self._command.batch)
            drafts = () if text else ("spec", "spec_max")  # searched with a text only
            self._refused = {
                n: why for n, why in self._refused.items() if n not in self._defaults or n in drafts
            }
        self._sweeps = any(n.startswith("op_offload.") for n in self._defaults)
        # Placement and cache of the command line stay, searched or not.
        self._fixed = {
            **{n: v for n, v in self._command.base.items() if n not in self._defaults}, **(settings or {}),
        }  # fmt: skip
        for name in settings or {}:
            if name not in self._defaults:
                raise TargetUnusable(
                    f"{name} cannot be set here: {self._refused.get(name, 'unknown setting')}"
                )
        for name in [n for n in self._command.incumbent if n not in self._defaults]:
            self._fixed[name] = self._unsearched(name, self._command.incumbent.pop(name))
        if "threads" in self._fixed and "threads_batch" not in self._defaults:
            self._fixed.setdefault("threads_batch", self._fixed["threads"])  # as the engines do
        self._perplexity = self._install.tool("llama-perplexity")
        self._text = text
        self._own_scratch = None if scratch else tempfile.TemporaryDirectory(prefix="dyno-ggml-")
        self._scratch = Path(scratch or (self._own_scratch.name if self._own_scratch else "."))
        self._settings: dict[str, Value] = {}
        self.peak_mib: float | None = None  # peak resident memory of the last process
        self._counters: Counters | None = None
        self.energy: dict[str, dict[str, tuple[int, float, float]]] = {}
        """By metric and source: tokens, seconds and joules of the last llama-bench process."""
        self._queue: dict[tuple[Workload, str], list[Sample]] = {}
        self._walls = Walls()

    def _unsearched(self, name: str, value: Value) -> Value:
        """Keep a value of the command line that is not searched. Raises TargetUnusable if llama-bench has no
        flag for it."""
        try:
            spell({name: value}, self._engine, self._install.bench_help, bench=True, metric="tg")
        except NoSpelling as error:
            why = self._refused.get(name, str(error))
            raise TargetUnusable(f"the command line's {name} cannot be measured here: {why}") from error
        return value

    def _read_command(self, tokens: Sequence[str], *, served: bool) -> Command:
        if not tokens:
            return Command()
        named = next((t for t in tokens if not t.startswith("-") and "=" not in t), "")
        source = os.path.basename(named)
        help_ = self._install.help_of(source) if named else None
        if help_ is None and self._install.common is not None:
            missing = f" ({self._install.folder} has no {source} to ask)" if source else ""
            source, help_ = self._install.common[0] + missing, self._install.common[1]
        if help_ is None:
            raise TargetUnusable(
                f"{self._install.folder} has no llama-server, llama-cli or llama-perplexity, so the "
                "command line cannot be read; give --bin a folder that has one"
            )
        command = parse_command(tokens, help_, self._install.bench_help, self._engine, source, served=served)
        if command.base.get("n_cpu_moe"):
            layers = min(int(command.base["n_cpu_moe"]), int(self._model["layers"]))
            command.base["n_cpu_moe"] = layers
        return command

    def _read_policy(self, ids: Mapping[str, int] | str) -> None:
        """The user's own `-op` by op name. Its numbers are read with the op ids of this binary."""
        if not self._command.policy:
            return
        if isinstance(ids, str):
            raise TargetUnusable(f"the command line's -op cannot be measured: {ids}")
        self._command.incumbent |= applicability.named_policy(self._command.policy, ids)

    def _layers_on_gpu(self) -> None:
        command = self._command
        if not self._gpus:
            command.bench += ["-ngl", "0"] if "-ngl" not in command.bench else []
        elif command.gpu_layers is None:
            command.bench += ["-ngl", "999"] if "-ngl" not in command.bench else []
        elif command.gpu_layers < int(self._model["layers"]):
            command.host_weights = True

    # ---- facts

    def describe(self) -> Description:
        return Description(
            target=self._engine,
            label=f"{self._device_name} · {self._engine} · {os.path.basename(self._path)}",
            device=self._device,
            model={k: v for k, v in self._model.items() if k not in ("name", "vocabulary")},
            engine={
                "name": self._engine,
                "version": str(self._version),
                "commit": self._version.commit,
                "device_name": self._device_name,
                "defaults": {**self._defaults, **self._fixed},
                "refused": self._refused,
                "notes": self._notes(),
                "incumbent": dict(self._command.incumbent),
                "fixed": sorted(self._fixed),
                "kept": list(self._command.kept),
                "variables": dict(self._command.env),
                "answers_compared": self.capabilities().answers,
                "reference": "llama-perplexity: no fusion, graphs or flash attention, u-batch 64",
                "cores": self._cores,
                "split_modes": applicability.split_modes(self._install),
                "bench": "llama-sweep-bench" if self._sweeps else "llama-bench",
                "ctx": 0,
                **({"gpu": self._gpu_facts} if self._gpu_facts else {}),
            },
            bounds=self._bounds(),
            capabilities=self.capabilities(),
        )

    def capabilities(self) -> Capabilities:
        compared = self._perplexity is not None and bool(self._model["vocabulary"])
        return Capabilities(answers=compared, rests=False, switch=Switch.PROCESS)

    def _notes(self) -> list[str]:
        """Notes on the words of the command line that do not stay as they are."""
        named = self._command.model
        if named is None or same_model(named, self._path):
            return []
        return [f"the command line's -m {named} is not the file of --model {self._path}, which is tuned"]

    def _bounds(self) -> dict[str, float]:
        """Rate bounds of this machine. They include the CPU if weights are or may be in host memory."""
        work = rate_limits.work_of(
            self._path, int(self._model.get("experts") or 0), int(self._model.get("experts_used") or 0)
        )
        devices = [rate_limits.gpu_limits(n) for n in self._gpus]
        if not devices or self._command.host_weights or {"placement", "n_cpu_moe"} & set(self._defaults):
            devices.append(rate_limits.cpu_limits(dict(_core.cpu_info())))
        return rate_limits.bounds(work, devices)

    # ---- processes

    def _placed(self, help_: Help) -> list[str]:
        """The words of the command line for a tool with this help. If they do not
        place layers, all layers go to the GPU, or none without a GPU. llama.cpp's own fit is turned off."""
        layers = [] if "-ngl" in self._command.carried else ["-ngl", "999" if self._gpus else "0"]
        fit = ["-fit", "off"] if help_.has("-fit") and self._engine == "llama.cpp" else []
        return [*self._command.common, *layers, *fit]

    def _environment(self) -> dict[str, str | None]:
        visible = ",".join(map(str, self._gpus))
        given: dict[str, str | None] = dict(self._command.env)
        return {**given, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}

    def _start(
        self, command: list[str], environment: Mapping[str, str | None], readings: Readings | None = None
    ) -> Finished:
        variables = {**self._environment(), **environment}
        look = None if readings is None else readings.look
        done = execute(command, variables, self._deadline, str(self._scratch), look)
        self.peak_mib = done.peak_mib
        self._log.add(command, environment, done)
        judge(done)
        return done

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        self._settings = {**self._defaults, **self._fixed, **configuration.settings}
        self._queue.clear()
        cache = str(self._settings.get("kv_type_v", "f16"))
        if cache not in ("f16", "bf16", "f32") and not self._settings.get("flash_attention", True):
            raise TargetFailure(TrialStatus.INVALID, f"a V cache in {cache} needs flash_attention")

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        """The next repetition of this measurement's process; pp: one prompt, tg: single tokens."""
        waiting = self._queue.setdefault((workload, metric), [])
        if not waiting and workload.served is not None:
            waiting += self._served(workload.served, metric)
        elif not waiting and (self._sweeps or self._deep(workload, metric)):
            waiting.append(self._sweep(workload, metric))
        elif not waiting:
            self._run(workload, metric)
        first = self._queue[workload, metric].pop(0)
        return Sample(metric, prompt, first.tokens, first.seconds, first.clock_seconds, first.joules)

    def count_energy(self, wanted: str | None) -> str:
        """Count the energy of llama-bench's tests beside their rates, if the counter can be read."""
        self._counters, self.energy = None, {}
        if wanted is None:
            return ""
        if wanted == DECIDES:
            return "for other engines, energy is only reported and does not decide a tune"
        if len(self._gpus) > 1:
            return "the energy of several GPUs is not counted"
        counters = _energy.Counters(_nvml.bus_id(self._gpus[0]) if self._gpus else None, _energy.POWERCAP)
        own = "gpu" if self._gpus else "cpu"
        if own not in counters.sources:
            return f"the energy of the {own.upper()} cannot be read: {counters.missing.get(own, '')}"
        self._counters = counters
        return ""

    def rest(self, seconds: float) -> None:
        """Do nothing: each measurement is a new process, and loading gives the device a rest."""

    def _run(self, workload: Workload, metric: str) -> None:
        """Run one process, which measures both metrics if they share their flags."""
        metrics = [metric]
        part = workload.part(metric)
        other = [m for m in workload.metrics if m != metric and not self._queue.get((workload, m))]
        other = [] if workload.parts else other
        threads = (self._settings.get("threads"), self._settings.get("threads_batch"))
        if other and threads[0] == threads[1]:
            metrics = [m for m in workload.metrics if m in (metric, *other)]
        spelled = spell(
            self._settings, self._engine, self._install.bench_help, bench=True,
            batch=self._command.batch, metric=part.kind, cuda=self._command.cuda,
        )  # fmt: skip
        counts = {workload.part(m).kind: workload.tokens(m) for m in metrics}
        tests = ["-p", str(counts.get("pp", 0)), "-n", str(counts.get("tg", 0))]
        if part.depth:
            if not self._install.bench_help.has("-d", "--n-depth"):
                raise TargetUnusable(
                    "this llama-bench has no -d and there is no llama-sweep-bench; give depth=0"
                )
            tests += ["-d", str(part.depth)]
        flags = [*tests, *self._command.bench, *spelled.all_args()]

        def ask(repetitions: int) -> tuple[Claim, dict[str, list[float]]]:
            command = [self._install.bench, "-m", self._path, "-o", "json", "-r", str(repetitions), *flags]
            readings = None if self._counters is None or part.depth else Readings(self._counters)
            done = self._measured(command, spelled.env, readings)
            printed = bench_rows(done.stdout)
            rows = {name: _row_of(printed, workload, name) for name in metrics}
            seconds: dict[str, list[float]] = {}
            for name, row in rows.items():
                self._read_back(row)
                seconds[name] = [float(x) / 1e9 for x in row["samples_ns"]]
            if readings is not None:
                self._count(readings, done.stdout, printed, rows, workload)
            return Claim({name: sum(each) for name, each in seconds.items()}, done.seconds), seconds

        claim, found = ask(_REPETITIONS)
        self._judge(workload, claim, lambda more: ask(_REPETITIONS + more)[0])
        for name, seconds in found.items():
            tokens = workload.tokens(name)
            # The process reports one clock only; the second clock is the wall time of whole processes.
            joules = sum(j for _, _, j in self.energy.get(name, {}).values()) / len(seconds) or None
            self._queue.setdefault((workload, name), []).extend(
                Sample(name, 0, tokens, s, s, joules) for s in seconds
            )

    def _count(
        self, readings: Readings, output: str, printed: Sequence[Mapping[str, Any]],
        rows: Mapping[str, Mapping[str, Any]], workload: Workload,
    ) -> None:  # fmt: skip
        """Keep the energy of each test of a process, from the readings during its run."""
        totals = [sum(row["samples_ns"]) / 1e9 for row in printed]
        of_tests = readings.of_tests(output.encode(), totals)
        for name, row in rows.items():
            at = next(n for n, each in enumerate(printed) if each is row)
            tokens = workload.tokens(name) * len(row["samples_ns"])
            self.energy[name] = {
                source: (tokens, totals[at], joules) for source, joules in of_tests[at].items()
            }

    def _judge(self, workload: Workload, claim: Claim, again: Callable[[int], Claim]) -> None:
        """Check the claim of a process against its own time and the default's. Raises TargetFailure
        (`implausible`).

        Args:
            again: runs the process with a number of additional repetitions.
        """
        if claim.too_long:
            raise _too_long("llama-bench", claim.total, claim.wall)
        if any(workload.part(m).depth for m in claim.samples):
            return  # each repetition fills the context first, outside the samples
        if self._settings == {**self._defaults, **self._fixed}:
            self._walls.learn(workload, claim)
            return
        more = self._walls.doubt(workload, claim, _REPETITIONS)
        why = ""
        for _ in range(2 if more else 0):  # twice, in case the machine was busy
            why = self._walls.untrue(workload, claim, again(more), more / _REPETITIONS)
            if not why:
                self._walls.believe(workload, claim)
                break
        if why:
            raise TargetFailure(TrialStatus.IMPLAUSIBLE, why)

    def _measured(
        self, command: list[str], environment: Mapping[str, str | None], readings: Readings | None = None
    ) -> Finished:
        """Run llama-bench. If it could not create a context, run it again with -v for the reason."""
        try:
            return self._start(command, environment, readings)
        except TargetFailure as failure:
            if failure.status != TrialStatus.CRASH or not self._install.bench_help.has("-v"):
                raise
            self._start([*command, "-v"], environment)  # raises with the reason
            raise

    def _deep(self, workload: Workload, metric: str) -> bool:
        """Whether only llama-sweep-bench can reach the depth of a workload."""
        bench = self._install.bench_help.has("-d", "--n-depth")
        return (
            workload.part(metric).depth > 0
            and not bench
            and self._engine == "ik_llama.cpp"
            and (self._install.tool("llama-sweep-bench") is not None)
        )

    def _sweep(self, workload: Workload, metric: str) -> Sample:
        """Run one process of llama-sweep-bench, which takes `-op`."""
        tool, help_ = self._install.tool("llama-sweep-bench"), self._install.help_of("llama-sweep-bench")
        if tool is None or help_ is None:
            raise TargetUnusable(f"{self._install.folder} no longer has llama-sweep-bench")
        part = workload.part(metric)
        alone = (part.tokens, 0) if part.kind == "pp" else (0, part.tokens)
        single = Workload(*alone, part.depth) if workload.parts else workload
        plan = sweep(
            tool, help_, self._path, self._settings, single, part.kind, batch=self._command.batch,
            op_ids=self._op_ids, cuda=self._command.cuda,
        )  # fmt: skip
        done = self._start([*plan.command, *self._placed(help_)], plan.env)
        seconds = plan.seconds(done.stdout + "\n" + done.stderr)
        if seconds > (1 + CLOCK_SKEW) * done.seconds:
            raise _too_long("llama-sweep-bench", seconds, done.seconds)
        return Sample(metric, 0, workload.tokens(metric), seconds, seconds)

    def _served(self, load: ServedLoad, metric: str) -> list[Sample]:
        """The samples of one llama-server, each with its own prompts."""
        tool, help_ = self._install.tool("llama-server"), self._install.help_of("llama-server")
        if tool is None or help_ is None:
            raise TargetUnusable(f"{self._install.folder} no longer has llama-server")
        words, variables = server.server_words(
            self._settings, load, self._engine, help_, self._op_ids, self._command.cuda
        )
        command = [tool, "-m", self._path, *self._placed(help_), *self._command.server, *words]
        names = _core.Gguf(self._path).get("tokenizer.ggml.tokens")
        if not isinstance(names, list):
            raise TargetUnusable(f"{self._path} has no vocabulary, so prompts cannot be sent to a server")
        if load.text is None:
            prompts = [load.prompts(len(names), seed) for seed in range(_REPETITIONS)]
        else:
            source = Prompts(self._path, len(names), self._text)
            prompts = [served_prompts(load, source, seed) for seed in range(_REPETITIONS)]
        found, self.peak_mib = server.served(
            command, {**self._environment(), **variables}, load, prompts,
            deadline=self._deadline, folder=str(self._scratch),
            ended=lambda done: self._log.add(command, variables, done),
        )  # fmt: skip
        for each in found:
            check_limits(load, each)
        return [Sample(metric, 0, each.output_tokens, each.seconds, each.clock_seconds) for each in found]

    def _read_back(self, row: Mapping[str, Any]) -> None:
        """Compare the settings in a result with the requested ones. Missing keys are skipped."""
        for name, key in _READ_BACK.items():
            asked, ran = self._settings.get(name), row.get(key)
            if asked is None or ran is None:
                continue
            same = bool(asked) == bool(ran) if isinstance(asked, bool) else str(asked) == str(ran)
            if isinstance(asked, bool) and isinstance(ran, int) and not isinstance(ran, bool) and ran < 0:
                continue  # -1: auto
            if not same:
                raise TargetFailure(
                    TrialStatus.INVALID, f"{name}: asked for {asked}, llama-bench ran {key}={ran}"
                )

    # ---- answers

    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        if self._perplexity is None or not self._model["vocabulary"]:
            lacking = f"{self._install.folder} has no llama-perplexity"
            if self._perplexity is not None:
                lacking = f"{self._path} has no vocabulary to read a text with"
            raise TargetUnusable(f"{lacking}, so answers cannot be compared")
        begun = self.clock()
        try:
            self.apply(configuration, context)
            base = self._reference()
            compare = ["--kl-divergence-base", str(base), "--kl-divergence"]
            for _ in range(_ATTEMPTS):
                done = self._perplexity_run(self._settings, compare)
                if complete(done.stdout):
                    break
            return parse_kld(done.stdout + "\n" + done.stderr, self.clock() - begun)
        except TargetFailure as failure:
            return Quality(TrialStatus(failure.status), message=failure.message, seconds=self.clock() - begun)

    def _reference(self) -> Path:
        """Write the reference logits: same model and device, smallest steps, without fusion, graphs, flash
        attention and quantised expert products."""
        base = self._scratch / "base.kld"
        if base.exists():
            return base
        text = self._scratch / "text.txt"
        own = None
        if self._text is not None:
            try:
                own = Path(self._text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TargetUnusable(f"--text {self._text}: {error}") from error
        write_text(text, own)
        exact: dict[str, Value] = {
            "flash_attention": False, "cuda_graphs": False, "fusion": False, "mmq_id_size": 0,
            "fused_moe": False, "ubatch": 64, "kv_type_k": "f16", "kv_type_v": "f16",
        }  # fmt: skip
        settings = {n: exact.get(n, v) for n, v in {**self._defaults, **self._fixed}.items()}
        partial = base.with_name(f"base-{os.getpid()}.partial")
        try:
            self._perplexity_run(settings, ["-f", str(text), "--kl-divergence-base", str(partial)])
        except TargetFailure as failure:
            raise TargetUnusable(f"the reference gave no answers: {failure.message}") from failure
        if not partial.exists():
            raise TargetUnusable(f"{self._perplexity} wrote no --kl-divergence-base file")
        os.replace(partial, base)
        return base

    def _perplexity_run(self, settings: Mapping[str, Value], extra: list[str]) -> Finished:
        help_ = self._install.help_of("llama-perplexity")
        if self._perplexity is None or help_ is None:
            raise TargetUnusable("no llama-perplexity")
        # Settings of a server (slots, tokens of a step, drafts) do not change the answers for a single text.
        settings = {n: v for n, v in settings.items() if n not in server.ITS_OWN}
        spelled = spell(
            settings, self._engine, help_, bench=False, batch=max(CONTEXT, self._command.batch),
            op_ids=self._op_ids, cuda=self._command.cuda,
        )  # fmt: skip
        command = [self._perplexity, "-m", self._path, "-c", str(CONTEXT), "--chunks", str(CHUNKS), *extra]
        return self._start([*command, *self._placed(help_), *spelled.all_args()], spelled.env)

    def clock(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        if self._own_scratch is not None:
            self._own_scratch.cleanup()


def _too_long(tool: str, claimed: float, passed: float) -> TargetFailure:
    return TargetFailure(
        TrialStatus.IMPLAUSIBLE, f"{tool} claims {claimed:.2f} s of samples, but ran for {passed:.2f} s"
    )


def _row_of(rows: Sequence[Mapping[str, Any]], workload: Workload, metric: str) -> Mapping[str, Any]:
    part = workload.part(metric)
    wanted = (part.tokens, 0) if part.kind == "pp" else (0, part.tokens)
    for row in rows:
        if (row["n_prompt"], row["n_gen"]) == wanted and int(row.get("n_depth", 0)) == part.depth:
            return row
    raise TargetFailure(TrialStatus.CRASH, f"llama-bench printed no test with {metric} of {workload}")


def from_options(engine: str, options: Mapping[str, Any]) -> GgmlTarget:
    try:
        return GgmlTarget(engine, **options)
    except TargetUnusable:
        raise
    except TuneError as error:
        raise TargetUnusable(str(error)) from error
