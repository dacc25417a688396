"""The check that answers stay the same, which comes before any speed counts.

A target compares logits with the exact path on the same device, with the routing pinned to the experts of the
exact path. The allowed difference depends on the changed knobs. `exact` knobs must not change any bit. With
`rounding` knobs, the distance from the exact path may be at most 1.5 times the distance of the default. With
`approx` knobs, the user sets the limit.

`rounding` is judged twice: by the mean over all tokens, and for each batch size separately, because the mean
would hide a kernel that is wrong for one size only. With few tokens of a size, chance matters. So there, the
two configurations are compared in pairs of token blocks, and only a significant difference counts. Pairs are
compared by the logarithm of their ratio. A fault multiplies the effect of rounding by about the same factor
in all blocks, whereas in nats, a few hard tokens dominate the sum and its spread.
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
ROUNDING_FLOOR = 1e-5  # nats per token; smaller differences come from the order of summation
FALSE_ALARM = 1e-3  # probability of refusing correct answers, over all batch sizes of a check
MIN_BLOCKS = 6  # fewer blocks are not enough to judge a batch size


def rounding_limit(kld: float) -> float:
    """The largest mean KLD (nats per token) that `rounding` allows, from the mean KLD of the default."""
    return ROUNDING_FACTOR * kld + ROUNDING_FLOOR


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    reason: str = ""


def judge(candidate: Quality, default: Quality, fidelity: Fidelity, approx_limit: float | None) -> Verdict:
    """The verdict on the answers of a configuration, by the fidelity of the changed knobs.

    Args:
    fidelity: The worst fidelity of the changed knobs.
    approx_limit: Limit of the user for `approx` knobs (mean KLD in nats per token), if any.
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
    # Written so that a KLD of NaN fails.
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
    """Whether the answers of a group differ by more than allowed, and not by chance: in the mean, and by a
    one-sided paired t test of log ratios.

    Args:
        ours, theirs: The same passage by the candidate and by the default.
        typical: Mean KLD of the default over all groups, in nats per token. Each group may have as much as
            the others: if the default computes one size in f16 and the others in int8, int8 is also correct
            for that size.
        false_alarm: Probability of True for answers that are just within the limit.
    """
    if len(ours.blocks) != len(theirs.blocks) or len(ours.blocks) < MIN_BLOCKS:
        return False  # too few blocks; only the mean over all tokens decides
    lift = max(0.0, typical - theirs.mean_kld)
    allowed = [rounding_limit(kld + lift) for kld in theirs.blocks]
    if not all(map(math.isfinite, (*ours.blocks, *allowed))):
        return True
    if sum(ours.blocks) <= sum(allowed):
        return False
    # The floor is added on both sides, so that a block without differences has a logarithm, and small ones
    # have little weight.
    logs = [
        math.log((a + ROUNDING_FLOOR) / (b + ROUNDING_FLOOR))
        for a, b in zip(ours.blocks, allowed, strict=True)
    ]
    count = len(logs)
    mean = sum(logs) / count
    deviation = math.sqrt(sum((v - mean) ** 2 for v in logs) / (count - 1))
    threshold = t_quantile(1 - false_alarm, count - 1)
    return mean > threshold * deviation / math.sqrt(count)
