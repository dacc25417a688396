"""A side of a comparison that is llama.cpp or ik_llama.cpp, with flags or a profile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..core.errors import TargetFailure, TuneError
from ..core.options import BESIDE
from ..core.protocol import Configuration, OpContext, TrialStatus
from ..targets.ggml.target import GgmlTarget
from .gpu_memory import GpuMemory
from .run import Answers, Energy, Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..core.protocol import Workload

PROMPTS = 3


class GgmlSide:
    """A side of a comparison that runs binaries of llama.cpp or ik_llama.cpp.

    Args:
    name: "A" or "B", for messages.
    binaries: Folder of the binaries.
    command: Flags of the common tools, e.g. of the user's llama-server.
    settings: Values that override the command line, e.g. from a profile.
    at_default: Settings of the command line that the profile resets to the engine's default.
    log: File for the standard error of its processes.
    """

    def __init__(
        self, name: str, engine: str, model: str, binaries: str, *, command: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None, gpu: int | None = None, text: str | None = None,
        deadline: float = 600.0, log: str | None = None, at_default: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.kind = engine
        self._name = name
        self._arguments: dict[str, Any] = {
            "engine": engine, "model": model, "binaries": binaries, "gpu": gpu, "command": list(command),
            "text": text, "deadline": deadline, "log": log,
        }  # fmt: skip
        self._gpu = gpu
        try:
            self._target = GgmlTarget(**self._arguments)
        except TuneError as error:
            raise TuneError(f"side {name}: {error}") from error
        self._target.count_energy(BESIDE)  # if no counter can be read, only rates are measured
        told = self._target.describe()
        unknown = [n for n in settings or {} if n not in told.engine["defaults"]]
        if unknown:
            why = told.engine["refused"].get(unknown[0], "no setting of it")
            raise TuneError(f"side {name}: {unknown[0]} cannot be set on {engine} here: {why}")
        own = {n: v for n, v in told.engine["incumbent"].items() if n not in at_default}
        self._settings = {**own, **(settings or {})}
        self.facts: dict[str, Any] = {
            "engine": engine, "version": told.engine["version"], "binaries": binaries,
            "command": list(command), "settings": self._settings,
        }  # fmt: skip

    def run(self, workload: Workload) -> Run:
        rates: dict[str, tuple[float, ...]] = {}
        peak: list[float] = []
        context = OpContext("ab")
        with GpuMemory(self._gpu) if self._gpu is not None else contextlib.nullcontext() as memory:
            try:
                self._target.apply(Configuration(self._settings), context)
                for metric in workload.metrics:
                    taken = [self._target.measure(workload, metric, n) for n in range(PROMPTS + 1)]
                    rates[metric] = tuple(s.rate for s in taken[1:])
                    peak += [self._target.peak_mib] if self._target.peak_mib is not None else []
            except TargetFailure as failure:
                raise TuneError(f"side {self._name} ({failure.status}): {failure.message}") from failure
        energy = Energy.by_source(self._target.energy)
        return Run(rates, max(peak, default=None), None if memory is None else memory.mib, energy)

    def answers(self, reference: Path, *, first: bool) -> Answers | None:
        """The answers by llama-perplexity, compared with the most exact settings of the first side; None
        without that program."""
        target = GgmlTarget(**self._arguments, scratch=str(reference))
        if not target.describe().engine["answers_compared"]:
            return None
        found = target.quality(Configuration(self._settings), OpContext("ab"))
        target.close()
        if found.status is not TrialStatus.OK:
            raise TuneError(
                f"side {self._name}: the answers cannot be computed ({found.status}): {found.message}"
            )
        return Answers(found.mean_kld, found.max_kld, found.top1, found.tokens)

    def close(self) -> None:
        self._target.close()
