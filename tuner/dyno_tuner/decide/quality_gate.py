"""The quality gate: the check of answers that a configuration must pass before its speed counts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..core.errors import TuneError
from ..core.protocol import Quality, TrialStatus
from ..space.knobs import Fidelity
from .answer_check import judge

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..core.options import Options
    from ..core.protocol import Configuration
    from ..record.context import Processes
    from ..record.recorder import Recorder
    from ..space.search_space import Point, Space
    from .answer_check import Verdict


SUDDEN = (TrialStatus.CRASH, TrialStatus.OOM)  # failures of a check that cost little time


class QualityGate:
    """The check of answers before a speed counts, with the results of earlier checks."""

    def __init__(
        self,
        recorder: Recorder,
        space: Space,
        options: Options,
        processes: Processes,
    ) -> None:
        self._recorder = recorder
        self._space = space
        self._options = options
        self._processes = processes
        self._verdicts: dict[object, tuple[TrialStatus, str] | None] = {}
        self._repeated: set[object] = set()  # code classes whose failed check was repeated
        self._tried_again: set[str] = set()  # keys of repeated checks
        self._qualities: dict[Point, Quality] = {}
        self.cut = False  # whether the budget has ended a check of answers
        self.unanswered = ""  # the reason why the answers of a proven profile could not be compared
        self.kernels_cut = False  # whether the budget has ended a check with kernels
        self._of_kernels: dict[object, Quality] = {}
        self._default: Quality | None = None
        self._met: set[object] = {space.code_class(space.default)}

    # ---- what was found

    def of(self, point: Point) -> Quality | None:
        """The answers of a point, or of another point that runs the same code."""
        if point in self._qualities:
            return self._qualities[point]
        kind = self._space.code_class(point)
        alike = (q for p, q in self._qualities.items() if self._space.code_class(p) == kind)
        return next((q for q in alike if q.status is TrialStatus.OK), None)

    def of_kernels(self, configuration: Configuration) -> Quality | None:
        return self._of_kernels.get(self._space.identity(configuration))

    def refused(self, point: Point) -> bool:
        """Whether a point with the same code has already failed the check."""
        return self._verdicts.get(self._space.code_class(point)) is not None

    def met(self, point: Point) -> None:
        """Record that a configuration is measured."""
        self._met.add(self._space.code_class(point))

    def change_space(self, space: Space) -> None:
        """Change to a space in which solved thresholds have fewer values. The answers for the remaining
        points stay valid."""
        known = [(self._space.settings(p), q) for p, q in self._qualities.items()]
        self._space = space
        self._qualities = {}
        for settings, quality in known:
            if all(settings[k.name] in k.values for k in space.knobs):
                self._qualities[space.point(settings)] = quality

    # ---- the checks

    def check_default(self) -> None:
        """Check the answers of the default. Raises TuneError if they cannot be computed."""
        if not self._options.check:
            return
        self._default = self._ask(self._space.default)
        if self._default.status is not TrialStatus.OK:
            raise TuneError(f"the answers of the default cannot be checked: {self._default.message}")
        if not math.isfinite(self._default.mean_kld):
            raise TuneError(
                f"the answers of the default are not finite (mean KLD {self._default.mean_kld}): the model's "
                "weights are damaged, or its activations overflow"
            )

    def _judge(self, quality: Quality, fidelity: Fidelity) -> Verdict:
        assert self._default is not None, "check_default() comes first"
        return judge(quality, self._default, fidelity, self._options.approx_limit)

    def questions(self, points: Sequence[Point]) -> list[tuple[Point, str, Configuration]]:
        """The checks that `admit` would make for these points, without repetition: point, key and
        configuration. The caller reports their results with `learn`."""
        if not self._options.check:
            return []
        found: dict[Point, None] = {}
        for point in map(self._reduced, points):
            kind = self._space.code_class(point)
            known = kind in self._verdicts or kind == self._space.code_class(self._space.default)
            if not known and point not in self._qualities:
                found[point] = None
        return [(p, self._key(p), self._space.configuration(p)) for p in found]

    def seconds(self, points: Collection[Point]) -> float:
        """The time in seconds that `admit_fully` of these points may take, for answers that were not compared
        yet."""
        if not self._options.check:
            return 0.0
        known = {*self._verdicts, self._space.code_class(self._space.default)}
        return len({self._space.code_class(p) for p in points} - known) * self._recorder.check_seconds

    def learn(self, point: Point, quality: Quality) -> None:
        self._qualities[point] = quality

    def _key(self, point: Point) -> str:
        return "quality/" + "/".join(map(str, point))

    def _ask(self, point: Point, again: bool = False) -> Quality:
        """The answers of a point.

        Args: `again`: whether to repeat a failed check once."""
        key, configuration = self._key(point), self._space.configuration(point)
        if point not in self._qualities:
            self._qualities[point] = self._measured(key, configuration)
        if again:
            self._qualities[point] = self._surely(key, configuration, self._qualities[point])
        return self._qualities[point]

    def _surely(self, key: str, configuration: Configuration, quality: Quality) -> Quality:
        """The answers, after a second try in a fresh process if the check has failed, because other programs
        can kill a worker or delay it. There is no second try if the budget has ended the check."""
        if not quality.status.kills or self._recorder.was_cut(key) or key in self._tried_again:
            return quality
        self._tried_again.add(key)
        self._recorder.forgive(configuration)
        return self._measured(f"{key}/retry", configuration)

    def _measured(self, key: str, configuration: Configuration) -> Quality:
        quality = self._recorder.quality(key, configuration, process=self._processes.number)
        self._processes.follow(quality.status)
        return quality

    def admit(self, point: Point) -> tuple[TrialStatus, str] | None:
        """Check a point before its speed is measured, with only those values that may change answers.
        Bit-exact knobs are checked with the others when a point reaches the finals.

        A failed check is repeated once before its code class is refused. A check that timed out is repeated
        only for the next point of the class, because a hanging one costs its whole deadline each time."""
        return self._admitted(self._reduced(point))

    def _reduced(self, point: Point) -> Point:
        """The point without the values of bit-exact knobs."""
        reduced = tuple(
            d if k.fidelity is Fidelity.EXACT else i
            for k, i, d in zip(self._space.knobs, point, self._space.default, strict=True)
        )
        return reduced if self._space.legal(reduced) else point

    def admit_fully(self, point: Point) -> tuple[TrialStatus, str] | None:
        """The reason why a point must not be measured; None if it may. A failed check is repeated once."""
        return self._admitted(point, final=True)

    def _admitted(self, point: Point, final: bool = False) -> tuple[TrialStatus, str] | None:
        kind = self._space.code_class(point)
        limit = self._options.max_distinct
        if limit is not None and kind not in self._met and len(self._met) >= limit:
            return TrialStatus.INVALID, f"{limit} configurations have been measured, and no more are allowed"
        if limit is not None:
            self._met.add(kind)  # admitted counts as measured, because several points can be admitted at once
        if not self._options.check or kind == self._space.code_class(self._space.default):
            return None
        first, refused = kind not in self._verdicts, self._verdicts.get(kind)
        failed = refused is not None and refused[0].kills
        if first or (failed and kind not in self._repeated):
            again = final or not first or self._ask(point).status in SUDDEN
            if again:
                self._repeated.add(kind)
            quality = self._ask(point, again)
            verdict = self._judge(quality, self._space.fidelity(point))
            status = quality.status if quality.status is not TrialStatus.OK else TrialStatus.INCORRECT
            self._verdicts[kind] = None if verdict.ok else (status, verdict.reason)
            if not verdict.ok:
                self._refuse(point, verdict.reason)
        return self._verdicts[kind]

    def still_right(self, point: Point) -> bool:
        """Check a profile in its final form, because removing entries can give a point that was never
        checked."""
        if not self._options.check:
            return True
        quality = self._ask(point, again=True)
        verdict = self._judge(quality, self._space.fidelity(point))
        if not verdict.ok:
            self._refuse(point, verdict.reason)
            self.unanswered = verdict.reason if quality.status.kills and not self.cut else ""
        return verdict.ok

    def _refuse(self, point: Point, reason: str) -> None:
        if any(self._recorder.was_cut(key) for key in (self._key(point), f"{self._key(point)}/retry")):
            self.cut = True  # neither correct nor wrong
            return
        self._recorder.note("incorrect", settings=self._space.settings(point), reason=reason)

    def why_not(self, configuration: Configuration) -> str:
        """The reason why a configuration with kernels is refused; empty if it is not."""
        if not self._options.check:
            return ""
        identity = self._space.identity(configuration)
        if identity not in self._of_kernels:
            key = f"quality/kernels/{len(self._of_kernels)}"
            quality = self._measured(key, configuration)
            self._of_kernels[identity] = self._surely(key, configuration, quality)
            self.kernels_cut |= any(self._recorder.was_cut(k) for k in (key, f"{key}/retry"))
        return self._judge(self._of_kernels[identity], self._fidelity(configuration)).reason

    def undecided(self, configuration: Configuration) -> bool:
        """Whether a check with these kernels had no result."""
        quality = self.of_kernels(configuration)
        return quality is not None and quality.status.kills

    def why_not_now(self, key: str, configuration: Configuration) -> str:
        """As `why_not`, with a key of the caller."""
        if not self._options.check:
            return ""
        quality = self._surely(key, configuration, self._measured(key, configuration))
        return self._judge(quality, self._fidelity(configuration)).reason

    def _fidelity(self, configuration: Configuration) -> Fidelity:
        """The fidelity of a configuration. Kernels may change rounding, and its settings may be allowed to
        change more."""
        settings = self._space.fidelity(self._space.point(configuration.settings))
        if not configuration.kernels:
            return settings
        return max(settings, Fidelity.ROUNDING, key=list(Fidelity).index)
