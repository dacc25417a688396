"""The binaries of llama.cpp and ik_llama.cpp as targets: every visit is a llama-bench process of its own.

What is asked for is read back from the results by key, and a run that did something else is a failed trial.
`llama_cpp` and `ik_llama_cpp` are the two doors to this module.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TargetFailure, TargetUnusable, TuneError
from ..target import Configuration, Description, OpContext, Quality, Sample, TrialStatus, Value, Workload
from . import ggml_knobs
from .ggml_command import Command, parse_command
from .ggml_device import cpu_device, cuda_device, model_identity
from .ggml_install import Installation
from .ggml_knobs import Here, spell
from .ggml_process import Finished, bench_rows, execute, judge
from .ggml_quality import CHUNKS, CONTEXT, parse_kld, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REPETITIONS = 4  # the cold one and three prompts
_READ_BACK = {"ubatch": "n_ubatch", "flash_attention": "flash_attn"}
# No GPU of today moves more bytes or does more operations in a second; with several, times their number.
_MOST_BYTES, _MOST_OPERATIONS = 2e13, 2e16


class GgmlTarget:
    """Args:
    engine: "llama.cpp" or "ik_llama.cpp".
    model: path of a GGUF file.
    binaries: folder of the engine's binaries.
    gpu: number of the GPU as nvidia-smi counts; None: the CPU alone.
    command: the user's own command line, if any.
    settings: values held fixed, by name.
    text: file whose text the answers are compared on.
    scratch: folder for the reference's logits.
    deadline: seconds that one process may take.
    """

    def __init__(
        self,
        engine: str,
        model: str,
        binaries: str,
        gpu: int | None = None,
        command: Sequence[str] = (),
        settings: Mapping[str, Value] | None = None,
        text: str | None = None,
        scratch: str | None = None,
        deadline: float = 600.0,
    ) -> None:
        self._path = model
        self._deadline = deadline
        self._install = Installation(binaries, engine)
        self._engine = engine
        self._model = model_identity(model)
        self._gpu = gpu
        self._device, self._device_name = (cpu_device(), "CPU") if gpu is None else cuda_device(gpu)
        self._version = self._install.version(model)
        self._command = self._read_command(command)
        self._layers_on_gpu()
        self._cores = int(cpu_device()["cores"])
        here = Here(self._install, self._device, self._model, self._command.host_weights)
        self._refused = ggml_knobs.refusals(here)
        self._defaults = ggml_knobs.defaults(here, self._cores)
        self._fixed = dict(settings or {})
        for name in (*self._fixed, *self._command.incumbent):
            if name not in self._defaults:
                raise TargetUnusable(
                    f"{name} can't be set here: {self._refused.get(name, 'unknown setting')}"
                )
        self._perplexity = self._install.tool("llama-perplexity")
        self._text = text
        self._own_scratch = None if scratch else tempfile.TemporaryDirectory(prefix="dyno-ggml-")
        self._scratch = Path(scratch or (self._own_scratch.name if self._own_scratch else "."))
        self._settings: dict[str, Value] = {}
        self.peak_mib: float | None = None  # largest resident set of the last process
        self._queue: dict[tuple[Workload, str], list[Sample]] = {}

    def _read_command(self, tokens: Sequence[str]) -> Command:
        if not tokens:
            return Command()
        named = next((t for t in tokens if not t.startswith("-") and "=" not in t), "")
        help_ = self._install.help_of(os.path.basename(named)) if named else None
        if help_ is None and self._install.common is not None:
            help_ = self._install.common[1]
        if help_ is None:
            raise TargetUnusable(
                f"{self._install.folder} has no llama-server, llama-cli or llama-perplexity, so the "
                "command line can't be read; give --bin a folder that has one"
            )
        return parse_command(tokens, help_, self._install.bench_help, self._engine)

    def _layers_on_gpu(self) -> None:
        command = self._command
        if self._gpu is None:
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
            model={k: v for k, v in self._model.items() if k != "name"},
            engine={
                "name": self._engine,
                "version": str(self._version),
                "commit": self._version.commit,
                "device_name": self._device_name,
                "defaults": {**self._defaults, **self._fixed},
                "refused": self._refused,
                "incumbent": dict(self._command.incumbent),
                "kept": list(self._command.kept),
                "variables": dict(self._command.env),
                "answers_compared": self._perplexity is not None,
                "reference": "llama-perplexity: no fusion, graphs or flash attention, u-batch 64",
                "cores": self._cores,
                "ctx": 0,
            },
            bounds=self._bounds(),
        )

    def _bounds(self) -> dict[str, float]:
        """Only what no machine can do: every weight that a token uses is read for it, and multiplied."""
        share = 1.0
        if self._model.get("experts"):
            share = float(self._model.get("experts_used") or 1) / float(self._model["experts"])
        # At least the share of the experts; half of that, because the embedding is not read.
        weights = 0.5 * share * float(self._model["file_bytes"])
        bounds = {"pp": _MOST_OPERATIONS / max(1.0, 2 * weights)}
        if weights > 1 << 29:  # smaller ones may live in a cache
            bounds["tg"] = _MOST_BYTES / weights
        return bounds

    # ---- processes

    def _environment(self) -> dict[str, str | None]:
        visible = "" if self._gpu is None else str(self._gpu)
        given: dict[str, str | None] = dict(self._command.env)
        return {**given, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}

    def _start(self, command: list[str], environment: Mapping[str, str | None]) -> Finished:
        done = execute(command, {**self._environment(), **environment}, self._deadline)
        self.peak_mib = done.peak_mib
        if done.stderr:
            # The worker keeps the last of it for messages.
            print(done.stderr[-4000:], flush=True)
        judge(done)
        return done

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        self._settings = {**self._defaults, **self._fixed, **configuration.settings}
        self._queue.clear()
        plain = self._command.value_cache in ("f16", "bf16", "f32")
        if not plain and not self._settings.get("flash_attention", True):
            raise TargetFailure(
                str(TrialStatus.INVALID), f"a V cache in {self._command.value_cache} needs flash_attention"
            )

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        """The next repetition of this visit's process; pp: one prompt, tg: token by token."""
        waiting = self._queue.setdefault((workload, metric), [])
        if not waiting:
            self._run(workload, metric)
        first = self._queue[workload, metric].pop(0)
        return Sample(metric, prompt, first.tokens, first.seconds, first.clock_seconds)

    def _run(self, workload: Workload, metric: str) -> None:
        """One process measures both metrics, where the same flags hold for both."""
        metrics = [metric]
        other = [m for m in workload.metrics if m != metric and not self._queue.get((workload, m))]
        threads = (self._settings.get("threads"), self._settings.get("threads_batch"))
        if other and threads[0] == threads[1]:
            metrics = [m for m in workload.metrics if m in (metric, *other)]
        try:
            spelled = spell(
                self._settings, self._engine, self._install.bench_help, bench=True,
                batch=self._command.batch, metric=metric,
            )  # fmt: skip
        except ValueError as error:
            raise TargetFailure(str(TrialStatus.INVALID), str(error)) from error
        command = [self._install.bench, "-m", self._path, "-o", "json", "-r", str(_REPETITIONS)]
        command += ["-p", str(workload.pp if "pp" in metrics else 0)]
        command += ["-n", str(workload.tg if "tg" in metrics else 0)]
        if workload.depth:
            if not self._install.bench_help.has("-d", "--n-depth"):
                raise TargetUnusable("this llama-bench has no -d, so give a workload with depth=0")
            command += ["-d", str(workload.depth)]
        done = self._start([*command, *self._command.bench, *spelled.all_args()], spelled.env)
        rows = bench_rows(done.stdout)
        total = 0.0
        for name in metrics:
            row = _row_of(rows, workload, name)
            self._read_back(row)
            seconds = [float(x) / 1e9 for x in row["samples_ns"]]
            total += sum(seconds)
            tokens = workload.tokens(name)
            # The process reports one clock only; what bounds it from outside is checked below and by the
            # roofline.
            self._queue.setdefault((workload, name), []).extend(
                Sample(name, 0, tokens, s, s) for s in seconds
            )
        if total > 1.05 * done.seconds:
            self._queue.clear()
            raise TargetFailure(
                str(TrialStatus.IMPLAUSIBLE),
                f"llama-bench claims {total:.2f} s of samples, but ran for {done.seconds:.2f} s",
            )

    def _read_back(self, row: Mapping[str, Any]) -> None:
        """Keys come and go; what is there has to agree with what was asked."""
        for name, key in _READ_BACK.items():
            asked, ran = self._settings.get(name), row.get(key)
            if asked is None or ran is None:
                continue
            same = bool(asked) == bool(ran) if isinstance(asked, bool) else str(asked) == str(ran)
            if isinstance(asked, bool) and isinstance(ran, int) and not isinstance(ran, bool) and ran < 0:
                continue  # -1: auto
            if not same:
                raise TargetFailure(
                    str(TrialStatus.INVALID), f"{name}: asked for {asked}, llama-bench ran {key}={ran}"
                )

    # ---- answers

    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        if self._perplexity is None:
            raise TargetUnusable(
                f"{self._install.folder} has no llama-perplexity, so answers can't be compared"
            )
        begun = self.clock()
        try:
            self.apply(configuration, context)
            base = self._reference()
            done = self._perplexity_run(
                self._settings, ["--kl-divergence-base", str(base), "--kl-divergence"]
            )
            return parse_kld(done.stdout + "\n" + done.stderr, self.clock() - begun)
        except TargetFailure as failure:
            return Quality(TrialStatus(failure.status), message=failure.message, seconds=self.clock() - begun)

    def _reference(self) -> Path:
        """Logits of the same model on the same device, without fusion, graphs, flash attention and quantised
        expert products, in the smallest steps."""
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
        exact = {"flash_attention": False, "cuda_graphs": False, "fusion": False, "mmq_id_size": 0}
        exact |= {"fused_moe": False, "ubatch": 64}
        # The cache is f16 here, whatever the command line has.
        settings = {n: exact.get(n, v) for n, v in {**self._defaults, **self._fixed}.items()}
        partial = base.with_name(f"base-{os.getpid()}.partial")
        try:
            self._perplexity_run(
                settings, ["-f", str(text), "--kl-divergence-base", str(partial)], cache=False
            )
        except TargetFailure as failure:
            raise TargetUnusable(f"the reference's answers can't be had: {failure.message}") from failure
        if not partial.exists():
            raise TargetUnusable(f"{self._perplexity} wrote no --kl-divergence-base file")
        os.replace(partial, base)
        return base

    def _perplexity_run(
        self, settings: Mapping[str, Value], extra: list[str], *, cache: bool = True
    ) -> Finished:
        help_ = self._install.help_of("llama-perplexity")
        if self._perplexity is None or help_ is None:
            raise TargetUnusable("no llama-perplexity")
        try:
            spelled = spell(
                settings, self._engine, help_, bench=False, batch=max(CONTEXT, self._command.batch)
            )
        except ValueError as error:
            raise TargetFailure(str(TrialStatus.INVALID), str(error)) from error
        placed = _placement(self._command, cache=cache)
        ngl = [] if "-ngl" in placed else ["-ngl", "0" if self._gpu is None else "999"]
        fit = ["-fit", "off"] if help_.has("-fit") and self._engine == "llama.cpp" else []
        command = [self._perplexity, "-m", self._path, "-c", str(CONTEXT), "--chunks", str(CHUNKS), *extra]
        return self._start([*command, *placed, *ngl, *fit, *spelled.all_args()], spelled.env)

    def clock(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        if self._own_scratch is not None:
            self._own_scratch.cleanup()


def _placement(command: Command, *, cache: bool) -> list[str]:
    """Of the tokens that stay as they are, those that say where weights live, and of what type the cache
    is."""
    wanted = {"-ngl", "--gpu-layers", "--n-gpu-layers", "-ot", "--override-tensor", "-ncmoe", "--n-cpu-moe",
              "-sm", "--split-mode", "-mg", "--main-gpu", "-ts", "--tensor-split", "--numa"}  # fmt: skip
    if cache:
        wanted |= {"-ctk", "--cache-type-k", "-ctv", "--cache-type-v"}
    alone = {"-cmoe", "--cpu-moe", "-nkvo", "--no-kv-offload", "--no-mmap"}
    found: list[str] = []
    for n, token in enumerate(command.kept):
        if token in alone or token.partition("=")[0] in wanted:
            found += [token] if token in alone or "=" in token else command.kept[n : n + 2]
    return found


def _row_of(rows: Sequence[Mapping[str, Any]], workload: Workload, metric: str) -> Mapping[str, Any]:
    wanted = (workload.pp, 0) if metric == "pp" else (0, workload.tg)
    for row in rows:
        if (row["n_prompt"], row["n_gen"]) == wanted and int(row.get("n_depth", 0)) == workload.depth:
            return row
    raise TargetFailure(str(TrialStatus.CRASH), f"llama-bench printed no test with {metric} of {workload}")


def from_options(engine: str, options: Mapping[str, Any]) -> GgmlTarget:
    try:
        return GgmlTarget(engine, **options)
    except TargetUnusable:
        raise
    except TuneError as error:
        raise TargetUnusable(str(error)) from error
