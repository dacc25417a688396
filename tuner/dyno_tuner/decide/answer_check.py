"""Whether the answers stayed the same: decided before a speed counts.

A target compares logits with the exact path's on the same device, with the routing pinned to that path's
experts. The allowed difference depends on the knobs that differ from the default: `exact` ones must not
change one bit, `rounding` ones may be at most half as far again from the exact path as the default is,
`approx` ones as far as the user allowed.

`rounding` is judged twice: by the mean over all tokens, and for every batch size alone, because a kernel that
is wrong for one size hides in the mean of all. With few tokens at a size chance matters, so there the two
configurations are compared in pairs, block of tokens by block, and only what chance does not explain counts.
Pairs are compared by the logarithm of their ratio: a fault multiplies what rounding does by about the same in
every block, while in nats a few hard tokens are most of the sum and of its spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.intervals import t_quantile
from ..core.protocol import Quality, TrialStatus
from ..space.knobs import Fidelity

if TYPE_CHECKING:
    from ..core.protocol import GroupQuality

ROUNDING_FACTOR = 1.5
ROUNDING_FLOOR = 1e-5  # nats per token; below it a difference is one of summation order
FALSE_ALARM = 1e-3  # of a check of sound answers, all its batch sizes together
MIN_BLOCKS = 6  # fewer say nothing about a batch size


def rounding_limit(kld: float) -> float:
    """The mean KLD (nats per token) that rounding may bring answers to, if the default's have this one."""
    return ROUNDING_FACTOR * kld + ROUNDING_FLOOR


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    reason: str = ""


def judge(candidate: Quality, default: Quality, fidelity: Fidelity, approx_limit: float | None) -> Verdict:
    """The verdict on the answers of a configuration, by what the knobs that differ may change.

    Args:
    fidelity: the worst of the knobs that differ.
    approx_limit: mean KLD in nats per token that the user allowed for `approx` knobs, if any.
    """
    if candidate.status is not TrialStatus.OK:
        return Verdict(False, f"the answers could not be compared: {candidate.message or candidate.status}")
    if candidate.digest and candidate.digest == default.digest:
        return Verdict(True)
    if fidelity is Fidelity.EXACT:
        return Verdict(
            False,
            "the answers differ from the default, although the changed settings must not change any bit",
        )
    limit = rounding_limit(default.mean_kld)
    if fidelity is Fidelity.APPROX:
        limit = max(limit, approx_limit or 0.0)
    # Written so that a KLD which is not a number fails.
    if not candidate.mean_kld <= limit:
        return Verdict(
            False, f"mean KLD {candidate.mean_kld:.3g} against the exact path, above the limit of {limit:.3g}"
        )
    if fidelity is not Fidelity.APPROX:
        defaults = {g.name: g for g in default.groups}
        pairs = [(g, defaults[g.name]) for g in candidate.groups if g.name in defaults]
        for ours, theirs in pairs:
            if beyond_chance(ours, theirs, default.mean_kld, FALSE_ALARM / len(pairs)):
                allowed = rounding_limit(max(theirs.mean_kld, default.mean_kld))
                return Verdict(
                    False,
                    f"mean KLD {ours.mean_kld:.3g} against the exact path in {ours.name} tokens, above the "
                    f"limit of {allowed:.3g}",
                )
    return Verdict(True)


def beyond_chance(ours: GroupQuality, theirs: GroupQuality, typical: float, false_alarm: float) -> bool:
    """Whether a group's answers are further off than allowed, and not by chance: further in the mean, and by
    a one-sided paired t test of log ratios.

    Args:
        ours, theirs: the same passage by the candidate and by the default.
        typical: mean KLD of the default over all groups, nats per token. A group is allowed as much as the
            others: where the default runs one size in halves and the rest in int8, int8 is no fault there.
        false_alarm: probability of saying so of answers that are just within what is allowed.
    """
    if len(ours.blocks) != len(theirs.blocks) or len(ours.blocks) < MIN_BLOCKS:
        return False  # too few to tell; the mean over everything has to do
    lift = max(0.0, typical - theirs.mean_kld)
    allowed = [rounding_limit(kld + lift) for kld in theirs.blocks]
    if not all(map(math.isfinite, (*ours.blocks, *allowed))):
        return True
    if sum(ours.blocks) <= sum(allowed):
        return False
    # The floor on both sides: a block without any difference has a logarithm, and one below the floor no say.
    logs = [
        math.log((a + ROUNDING_FLOOR) / (b + ROUNDING_FLOOR))
        for a, b in zip(ours.blocks, allowed, strict=True)
    ]
    count = len(logs)
    mean = sum(logs) / count
    deviation = math.sqrt(sum((v - mean) ** 2 for v in logs) / (count - 1))
    threshold = t_quantile(1 - false_alarm, count - 1)
    return mean > threshold * deviation / math.sqrt(count)
