"""A side of a comparison that is dyno: this build, another build or a commit, with a profile or the
defaults."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import _core, _energy, _nvml
from dyno.devices import built_for_cuda, resolve_device
from dyno.errors import DynoError
from dyno.quality import Comparer

from ..core.errors import TargetFailure, TuneError
from ..targets.check_text import TEXT
from ..targets.ggml.process import Finished, execute
from .gpu_memory import GpuMemory
from .run import Answers, Energy, Run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from ..core.protocol import Workload

PROMPTS = 3
_MOST_LOGITS = 1 << 26  # rows times vocabulary: 256 MiB
_MOST_TOKENS = 2048
_EXACT = {"numerics": "exact"}


def gpu_memory(gpu: int | None) -> AbstractContextManager[GpuMemory | None]:
    """A monitor for the memory of the GPU `cuda:N`; without a GPU, one that does nothing."""
    if gpu is None:
        return contextlib.nullcontext()
    # A build for the CPU can run another build for GPUs, but cannot query the device itself.
    bus = str(resolve_device(f"cuda:{gpu}").info["pci_bus_id"]) if built_for_cuda() else None
    return GpuMemory(gpu, bus)


def gpu_bus(gpu: int | None) -> str | None:
    """The PCI bus id of the GPU `cuda:N`; None without a GPU, or if it is unknown."""
    if gpu is None:
        return None
    return str(resolve_device(f"cuda:{gpu}").info["pci_bus_id"]) if built_for_cuda() else _nvml.bus_id(gpu)


class DynoSide:
    """A side of a comparison that is a build of dyno.

    Args:
    name: "A" or "B", for messages.
    build: Folder to import `dyno` from; None: the installed one.
    profile: Path of a profile; None: the engine's defaults.
    settings: Values that override the profile.
    force: Whether to use the profile even if it belongs to another model.
    """

    kind = "dyno"

    def __init__(
        self, name: str, model: str, *, build: Path | None = None, profile: Path | None = None,
        settings: Mapping[str, Any] | None = None, gpu: int | None = None, deadline: float = 600.0,
        force: bool = False,
    ) -> None:  # fmt: skip
        self._name = name
        self._model = model
        self._build = build
        self._profile = profile
        self._settings = dict(settings or {})
        self._gpu = gpu
        self._deadline = deadline
        self._force = force and profile is not None
        self.facts: dict[str, Any] = {
            "engine": "dyno", "build": str(build) if build else None,
            "profile": str(profile) if profile else None, "settings": self._settings,
        }  # fmt: skip

    def _ask(self, do: str, settings: Mapping[str, Any], **more: Any) -> tuple[dict[str, Any], Finished]:
        exact = "numerics" in settings and settings["numerics"] == "exact"
        request = {
            "do": do, "model": self._model, "device": "cpu" if self._gpu is None else f"cuda:{self._gpu}",
            "profile": str(self._profile) if self._profile and not exact else None,
            "settings": dict(settings), "force": self._force and not exact,
            "build": str(self._build) if self._build is not None else None, **more,
        }  # fmt: skip
        command = [sys.executable, "-P", str(Path(__file__).with_name("child.py")), json.dumps(request)]
        path = {"PYTHONPATH": str(self._build)} if self._build is not None else {}
        try:
            done = execute(command, path, self._deadline)
        except TargetFailure as failure:
            raise TuneError(f"side {self._name}: {failure.message}") from failure
        lines = done.stdout.strip().splitlines()
        try:
            answer = json.loads(lines[-1]) if lines else {}
        except ValueError:
            answer = {}
        if done.code != 0 or not isinstance(answer, dict) or "from" not in answer:
            said = answer.get("error") if isinstance(answer, dict) else None
            raise TuneError(f"side {self._name}: {said or f'exit code {done.code}: {done.last_line()}'}")
        if self._build is not None and not Path(answer["from"]).is_relative_to(self._build):
            raise TuneError(f"side {self._name}: {self._build} was asked for, but {answer['from']} ran")
        if answer["ignored"]:
            why = "; ".join(answer["reasons"]) or "the engine gave no reason"
            raise TuneError(f"side {self._name}: profile {self._profile} is not used here: {why}")
        if not exact:
            self.facts |= {"version": answer["version"], **answer["build"], "fallbacks": answer["fallbacks"]}
        return answer, done

    def run(self, workload: Workload) -> Run:
        settings = {"ctx": max(workload.longest, 64), **self._settings}
        parts = [
            {"metric": m, "kind": p.kind, "tokens": p.tokens, "depth": p.depth}
            for m, p in ((m, workload.part(m)) for m in workload.metrics)
        ]
        with gpu_memory(self._gpu) as memory:
            answer, done = self._ask(
                "speed", settings, parts=parts, prompts=PROMPTS, vocab=self._facts[0],
                energy=str(_energy.__file__), bus=gpu_bus(self._gpu), powercap=_energy.POWERCAP,
            )  # fmt: skip
        rates = {m: tuple(float(x) for x in answer["rates"][m]) for m in workload.metrics}
        energy = Energy.by_source(answer.get("energy", {}))
        return Run(rates, done.peak_mib, None if memory is None else memory.mib, energy)

    def load(self) -> tuple[float, float, float | None]:
        """Seconds to import dyno and open the model, and the MiB on host and GPU before the first token."""
        with gpu_memory(self._gpu) as memory:
            answer, _ = self._ask("load", self._settings)
        gpu = None if memory is None else memory.mib
        return float(answer["load_seconds"]), float(answer["resident_mib"]), gpu

    @functools.cached_property
    def _facts(self) -> tuple[int, bool, int]:
        """The vocabulary size, whether the model has experts, and the longest context."""
        try:
            model = _core.describe_model(self._model)
        except (DynoError, OSError) as error:
            raise TuneError(str(error)) from error
        return int(model["n_vocab"]), bool(model.get("experts")), int(model["n_ctx_train"])

    def _sequences(self) -> list[list[int]]:
        """Prompts of several lengths, including odd ones. They are text if the file has a vocabulary."""
        vocab, _, context = self._facts
        total = max(64, min(_MOST_TOKENS, _MOST_LOGITS // vocab))
        try:
            from dyno.tokenizer import Tokenizer

            text = np.asarray(Tokenizer.from_gguf(self._model).encode(TEXT), dtype=np.int32)
            # The text wraps around at a length that is not a multiple of a paragraph, so that repetitions are
            # rare.
            tokens = np.concatenate([np.roll(text, 37 * n) for n in range(1 + total // max(1, len(text)))])
        except DynoError:
            tokens = np.random.default_rng(20261120).integers(vocab, size=total)
        longest = min(512, context)
        cuts = [1, 8, 41, 170, *range(170 + longest, total, longest)]
        parts = np.split(tokens[:total], [c for c in cuts if c < total])
        return [[int(t) for t in part[:longest]] for part in parts if len(part)]

    def answers(self, reference: Path, *, first: bool) -> Answers | None:
        sequences = self._sequences()
        context = {"ctx": max(len(s) for s in sequences)}
        exact = reference / "exact.npz"
        if first and not exact.exists():
            own = {k: v for k, v in self._settings.items() if k in ("threads", "threads_batch")}
            self._ask(
                "answers", {**context, **own, **_EXACT}, sequences=sequences, out=str(exact), pins="",
                capture=self._facts[1],
            )  # fmt: skip
        mine = reference / f"{self._name}.npz"
        self._ask(
            "answers", {**context, **self._settings}, sequences=sequences, out=str(mine), pins=str(exact),
            capture=False,
        )  # fmt: skip
        comparer = Comparer()
        with np.load(exact, allow_pickle=False) as truth, np.load(mine, allow_pickle=False) as ours:
            for n in range(len(sequences)):
                comparer.add(truth[f"logits{n}"], ours[f"logits{n}"])
        found = comparer.result()
        return Answers(found.mean_kld, found.max_kld, found.top1_agreement, found.rows)

    def close(self) -> None:
        """Nothing to close, because no resource is kept between two processes."""
