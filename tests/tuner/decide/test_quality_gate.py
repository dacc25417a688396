"""What is asked of a configuration, and when its answers are no longer the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest_tuner import Simulated
from dyno import _core
from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.intervals import keyed_rng, t_quantile
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import GroupQuality, Quality, TrialStatus
from dyno_tuner.core.workload import Workload
from dyno_tuner.decide.answer_check import FALSE_ALARM, MIN_BLOCKS, beyond_chance, judge
from dyno_tuner.decide.quality_gate import QualityGate
from dyno_tuner.output.verdict import verdict
from dyno_tuner.record.context import Processes
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.dyno import answers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dyno_tuner.core.protocol import Configuration
    from dyno_tuner.space.search_space import Point


def quality(**blocks: Sequence[float]) -> Quality:
    groups = [
        GroupQuality(
            name, 16 * len(kld), float(np.mean(kld)), max(kld), 16 * len(kld), tuple(map(float, kld))
        )
        for name, kld in blocks.items()
    ]
    return Quality.of(groups, "digest of " + repr(blocks), 0.0)


def block_means(key: object, count: int = 16, mean: float = 3e-4) -> np.ndarray:
    """As text gives them: few tokens are much harder than the rest."""
    return np.asarray(mean * keyed_rng("kld", key).lognormal(-0.32, 0.8, count))


def test_a_fault_at_one_batch_size_is_not_hidden_by_the_others() -> None:
    caught = 0
    for run in range(100):
        base = {f"g{i}": block_means((run, i)) for i in range(9)}
        # 0.4 % of perplexity are 0.004 nats; the rest only rounds otherwise.
        wrong = {n: b * keyed_rng("rounding", run, n).lognormal(0, 0.1, len(b)) for n, b in base.items()}
        wrong["g4"] = base["g4"] + block_means((run, "fault"), mean=0.004)
        mean = judge(quality(**wrong), quality(**base), Fidelity.ROUNDING, None)
        caught += not mean.ok
    assert caught >= 99


def test_other_rounding_is_no_fault() -> None:
    alarms = 0
    for run in range(400):
        base = {f"g{i}": block_means((run, i)) for i in range(9)}
        # As far from the exact path as the default, in other places.
        other = {n: block_means((run, n, "other")) * 0.3 + b * 0.7 for n, b in base.items()}
        alarms += not judge(quality(**other), quality(**base), Fidelity.ROUNDING, None).ok
    assert alarms <= 4


def test_a_hard_token_does_not_hide_a_fault() -> None:
    caught = 0
    for run in range(100):
        base = quality(a=block_means((run, "base")))
        # Five times as far everywhere, and one block that is most of the sum and of its spread.
        wrong = 5 * np.asarray(base.groups[0].blocks) * keyed_rng("fault", run).lognormal(0, 0.4, 16)
        wrong[run % 16] *= 20
        ours = quality(a=wrong)
        caught += beyond_chance(ours.groups[0], base.groups[0], base.mean_kld, FALSE_ALARM / 9)
    assert caught >= 99


def test_one_hard_token_does_not_condemn() -> None:
    base = quality(a=[1e-4] * 16)
    spike = quality(a=[1e-4] * 15 + [1e-2])
    assert not beyond_chance(spike.groups[0], base.groups[0], base.mean_kld, FALSE_ALARM)


def test_just_within_what_is_allowed_is_hardly_ever_condemned() -> None:
    alarms = 0
    for run in range(1000):
        base = quality(a=block_means((run, "base")))
        # 1.5 times as far on average, from block to block anything.
        noise = keyed_rng("within", run).lognormal(-0.18, 0.6, 16)
        ours = quality(a=1.5 * np.asarray(base.groups[0].blocks) * noise)
        alarms += beyond_chance(ours.groups[0], base.groups[0], base.mean_kld, 0.01)
    assert alarms <= 20


def test_what_rounds_as_the_other_sizes_do_is_no_fault() -> None:
    """The default runs one size in halves and all others in int8; the candidate runs all of them in int8."""
    int8 = {f"g{i}": block_means(i) for i in range(10)}
    default = {**int8, "g0": block_means(0, mean=1e-6)}
    assert judge(quality(**int8), quality(**default), Fidelity.ROUNDING, None).ok
    wrong = {**int8, "g0": 10 * int8["g0"]}
    assert not judge(quality(**wrong), quality(**default), Fidelity.ROUNDING, None).ok


def test_differences_below_the_floor_are_none() -> None:
    base = quality(a=[0.0] * 16)
    assert not beyond_chance(quality(a=[9e-6] * 16).groups[0], base.groups[0], 0.0, FALSE_ALARM)
    assert beyond_chance(quality(a=[3e-5] * 16).groups[0], base.groups[0], 0.0, FALSE_ALARM)


def test_what_is_not_a_number_condemns() -> None:
    base = quality(a=[1e-4] * 16)
    for bad in (float("nan"), float("inf")):
        found = quality(a=[1e-4] * 15 + [bad])
        assert beyond_chance(found.groups[0], base.groups[0], base.mean_kld, FALSE_ALARM)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_default_that_is_not_a_number_ends_the_tune(bad: float) -> None:
    class Recorder:
        def quality(self, key: str, configuration: object, process: int) -> Quality:
            return quality(a=[1e-4] * 15 + [bad])

    space = Space([Knob("threads", (1, 2), default=1, fidelity=Fidelity.EXACT)])
    gate = QualityGate(Recorder(), space, Options(Workload()), Processes())  # type: ignore[arg-type]
    with pytest.raises(TuneError, match="not finite"):
        gate.check_default()


def test_a_quality_survives_the_journal() -> None:
    before = quality(a=[1e-4, 2e-4], b=[3e-4])
    assert Quality.from_dict(before.to_dict()) == before


@pytest.mark.parametrize(
    ("probability", "degrees", "exact"),
    [
        (0.975, 1, 12.7062),
        (0.975, 5, 2.5706),
        (0.001, 7, -4.7853),
        (0.999, 7, 4.7853),
        (0.9999, 15, 4.8800),
        (0.9999, 30, 4.2340),
        (0.99999, 15, 6.1089),
    ],
)
def test_t_quantiles(probability: float, degrees: int, exact: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(exact, rel=1e-4)


def test_passages_reach_every_range_of_batch_sizes(trained_model: Path) -> None:
    asked = answers.groups(str(trained_model), total=answers.MOST, ctx=1024, largest=512, vocabulary=8192)
    ranges = [_core.ops.bucket_name(group.size) for group in asked]
    assert ranges == ["m1", "m2-4", "m5-8", "m9-16", "m17-32", "m33-64", "m65-128", "m129-256", "m257-512"]
    assert sum(len(group.scored()) for group in asked) >= 4000
    assert min(len(group.scored()) for group in asked) >= answers.BLOCK * 12
    other = answers.groups(
        str(trained_model), total=answers.MOST, ctx=1024, largest=512, vocabulary=8192, seed=1
    )
    assert not np.array_equal(asked[0].tokens, other[0].tokens)


def test_a_large_batch_is_scored_sparsely(trained_model: Path) -> None:
    def asked(once: int, vocabulary: int = 8192) -> list[answers.Group]:
        return answers.groups(
            str(trained_model), total=answers.MOST, ctx=4096, largest=512, vocabulary=vocabulary, once=once
        )

    assert [g.size for g in asked(4096)][:-1] == [g.size for g in asked(0)]
    large = asked(4096)[-1]
    assert (large.size, len(large.tokens)) == (4000, 4000)
    assert 400 <= len(large.scored()) <= 600
    # Of a large vocabulary the logits would not fit, so fewer rows of every group are kept.
    rows = sum(len(g.scored()) for g in asked(4096, 150_000))
    assert rows * 150_000 * 4 < 600 << 20
    assert len(asked(4096, 150_000)[-1].scored()) >= 50


def test_a_group_feels_of_settings_what_its_passes_reach() -> None:
    tokens = np.zeros(1000, dtype=np.int32)
    group = answers.Group(500, tokens, 1)
    base = {"ubatch": 512, "mmq_max_tokens": 65536, "fusion": True}
    same = [{"ubatch": 4096}, {"mmq_max_tokens": 500}]
    other = [{"ubatch": 256}, {"mmq_max_tokens": 499}, {"fusion": False}, {"ubatch": 100}]
    assert all(group.code({**base, **change}) == group.code(base) for change in same)
    codes = [group.code({**base, **change}) for change in other]
    assert len({*codes, group.code(base)}) == len(other) + 1
    # 256 and 244: a bound between the two passes.
    assert group.code({**base, "ubatch": 256, "mmq_max_tokens": 250}) != codes[0]


def test_scored_positions_are_what_the_engine_returns(trained_model: Path) -> None:
    session = _core.Session(str(trained_model), context={"ctx": 64})
    tokens = np.arange(10, 47, dtype=np.int32)
    group = answers.Group(size=16, tokens=tokens, every=5)
    every, _ = session.decode([(0, tokens)], rows="all")
    rows = answers.answer(session, group, None)
    wanted = group.scored()
    assert list(wanted) == [4, 9, 14, 15, 20, 25, 30, 31, 36]
    assert rows.shape == (len(wanted), every.shape[1])
    assert np.allclose(rows, every[wanted], atol=0.05)
    assert answers.score(group, every[wanted], rows).mean_kld < 1e-3


def test_a_short_budget_compares_fewer_tokens_but_enough_of_each_size() -> None:
    """The exact path may take ten seconds, or an eighteenth of the budget."""
    full = answers.affordable(200.0, None)
    assert full == answers.affordable(200.0, 180.0) == 2000
    assert answers.affordable(200.0, 90.0) == 1000
    assert answers.affordable(200.0, 10.0) == answers.ENOUGH
    assert answers.affordable(20.0, 10.0) == answers.affordable(20.0, None) == 200
    sizes = [n for n in answers.SIZES if n <= 512]
    # A size is judged by blocks of its own, so each needs its share of the tokens.
    assert answers.ENOUGH // len(sizes) >= MIN_BLOCKS * answers.BLOCK


class _Answers:
    """A recorder whose checks of this configuration end so, one after the other; all others are right."""

    def __init__(self, *ends: TrialStatus, kld: float = 0.0) -> None:
        self._ends, self._kld = list(ends), kld
        self.asked: list[tuple[str, int]] = []  # key and process
        self.forgiven: list[object] = []

    def quality(self, key: str, configuration: Configuration, process: int) -> Quality:
        if configuration.settings["ubatch"] == 512:
            return Quality(TrialStatus.OK, 1e-4, 1e-3, 1.0, 512, "default")
        self.asked.append((key, process))
        status = self._ends.pop(0) if self._ends else TrialStatus.OK
        return Quality(status, self._kld, self._kld, 1.0, 512, "other", message="it died")

    def was_cut(self, key: str) -> bool:
        return False

    def forgive(self, configuration: Configuration) -> None:
        self.forgiven.append(configuration.settings["ubatch"])

    def note(self, kind: str, **data: object) -> None:
        """Nobody reads it."""


def _gate(recorder: _Answers, *others: Knob) -> QualityGate:
    space = Space([Knob("ubatch", (512, 1024), default=512, fidelity=Fidelity.ROUNDING), *others])
    gate = QualityGate(recorder, space, Options(Workload()), Processes())  # type: ignore[arg-type]
    gate.check_default()
    return gate


@pytest.mark.parametrize("status", [TrialStatus.CRASH, TrialStatus.OOM, TrialStatus.TIMEOUT])
def test_a_check_that_failed_once_is_made_again(status: TrialStatus) -> None:
    recorder = _Answers(status)
    gate = _gate(recorder)
    if status is TrialStatus.TIMEOUT:
        assert gate.admit((1,)) == (status, "the answers could not be compared: it died"), (
            "the search goes on"
        )
        assert [key for key, _ in recorder.asked] == ["quality/1"]
    assert gate.admit_fully((1,)) is None
    assert gate.still_right((1,))
    assert gate.unanswered == ""
    assert recorder.asked == [("quality/1", 0), ("quality/1/retry", 1)], "in a fresh process"
    assert recorder.forgiven == [1024]


@pytest.mark.parametrize("status", [TrialStatus.CRASH, TrialStatus.OOM, TrialStatus.TIMEOUT])
@pytest.mark.parametrize("ends", [1, 2])
def test_the_search_discards_no_class_of_code_for_one_failed_check(status: TrialStatus, ends: int) -> None:
    """Threads change no answer: both points run the same code, whose check is made once for both."""
    recorder = _Answers(*[status] * ends)
    threads = Knob("threads", (4, 8), default=4, fidelity=Fidelity.EXACT, code=lambda value, settings: 0)
    gate = _gate(recorder, threads)
    late = status is TrialStatus.TIMEOUT
    assert (gate.admit((1, 0)) is None) == (ends == 1 and not late)
    assert len(recorder.asked) == (1 if late else 2), "a check that is late waits for the next point"
    for point in ((1, 1), (1, 0)):
        assert (gate.admit(point) is None) == (ends == 1)
        assert (gate.admit_fully(point) is None) == (ends == 1)
    assert len(recorder.asked) == 2
    assert recorder.forgiven == [1024]


def test_a_check_that_failed_twice_is_neither_right_nor_wrong() -> None:
    recorder = _Answers(TrialStatus.CRASH, TrialStatus.TIMEOUT)
    gate = _gate(recorder)
    assert not gate.still_right((1,))
    assert "it died" in gate.unanswered
    assert gate.admit_fully((1,)) is not None
    assert len(recorder.asked) == 2, "not a third time"


def test_a_wrong_answer_is_wrong_the_first_time() -> None:
    for recorder in (_Answers(TrialStatus.INVALID), _Answers(kld=0.5)):
        gate = _gate(recorder)
        assert not gate.still_right((1,))
        assert gate.unanswered == ""
        assert len(recorder.asked) == 1


def test_a_profile_whose_answers_nobody_could_compare_is_not_called_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proven: set[str] = set()

    def failed(gate: QualityGate, point: Point) -> bool:
        space = gate._space
        proven.update(space.knobs[n].name for n in space.entries(point))
        gate.unanswered = "the answers could not be compared: it died"
        return False

    monkeypatch.setattr(QualityGate, "still_right", failed)
    outcome = Simulated("saturating", 1, max_trials=14).outcome
    assert (outcome.entries, outcome.status, outcome.unproven) == ([], "unproven", True)
    assert "the answers could not be compared: it died" in verdict(outcome)
    assert "slower than the defaults" not in verdict(outcome)
    assert outcome.promises
    assert not any("needed" in p for p in outcome.promises), "a longer budget would not help"
    assert proven
    assert proven <= set(outcome.left_open)
    assert not set(outcome.left_open) & set(outcome.judged)
    outcome.promises = []  # as of a best trial that gained less than its margin
    assert not proven & set(outcome.judged)
