from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno_tuner.core.protocol import Configuration, Measurement, OpContext, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.surfaces import SURFACES, Surface
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.core.outcome import Outcome
    from dyno_tuner.space.search_space import Space

WORKLOAD = Workload(pp=64, tg=8)


class _Watched(InlineExecutor):
    """Remembers key and kernels of every measurement."""

    def __init__(self, target: SimulatedTarget) -> None:
        super().__init__(target)
        self.visited: list[tuple[str, list[dict[str, Any]]]] = []

    def measurement(self, configuration: Configuration, *args: Any) -> Measurement:
        context = next(a for a in args if isinstance(a, OpContext))
        self.visited.append((context.key, [k.to_dict() for k in configuration.kernels]))
        return super().measurement(configuration, *args)


class SlowToStart(SimulatedTarget):
    """A process has to load a model first: for four seconds, as on a GPU, longer than its measurements
    take."""

    start = 4.0  # seconds

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        fresh = context.process != self._context.process
        super().apply(configuration, context)
        if fresh:
            self._pass(self.start)


def short_measurements(surface: Surface) -> Workload:
    """Prompts of 0.15 s and generation of 0.1 s, with the defaults."""
    rates = surface.rates({k.name: k.default for k in surface.knobs})
    return Workload(pp=round(0.15 * rates["pp"]), tg=round(0.1 * rates["tg"]))


class Simulated:
    """One tune of a simulated engine, with the truth beside it."""

    def __init__(
        self, surface: str | Surface, seed: int, noise: SimulationNoise | None = None, **options: Any
    ) -> None:
        self.surface = SURFACES[surface]() if isinstance(surface, str) else surface
        self.space: Space = self.surface.space()
        options.setdefault("max_trials", max(15, len(self.space) // 10))
        workload = options.pop("workload", WORKLOAD)
        self.options = Options(workload, seed=seed, **{"weights": dict(self.surface.weights), **options})
        executor = _Watched(SimulatedTarget(self.surface, seed, noise))
        self.visited = executor.visited
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.recorder = Recorder(executor, workload, identity=self.space.identity, virtual_time=True)
        self.recorder.on_note = lambda kind, data: self.notes.append((kind, dict(data)))
        self.tune = Tune(self.recorder, self.space, self.options)
        self.outcome: Outcome = self.tune.run()

    def truth(self, settings: dict[str, Any]) -> float:
        return self.surface.truth(settings)

    @property
    def optimum(self) -> float:
        return max(self.truth(self.space.settings(p)) for p in self.space.points())

    @property
    def regret(self) -> float:
        """True log distance from the best point of the space."""
        return self.optimum - self.truth(self.outcome.settings)

    def truly_slower_entries(self) -> list[str]:
        """Entries that cost more than the margin of what they move."""
        slower = []
        for entry in self.outcome.entries:
            without = {**self.outcome.settings, entry.name: entry.default}
            loss = self.truth(without) - self.truth(self.outcome.settings)
            if loss > max(self.outcome.margin.values()):
                slower.append(entry.name)
        return slower
