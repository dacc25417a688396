"""Whether the answers stayed the same: decided before a speed counts.

A target compares logits with the exact path's on the same device, with the routing pinned to that path's
experts. What is allowed depends on the knobs that differ from the default: `exact` ones must not change one
bit, `rounding` ones may be at most half as far again from the exact path as the default is, `approx` ones
as far as the user allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .knobs import Fidelity
from .target import Quality, TrialStatus

ROUNDING_FACTOR = 1.5
ROUNDING_FLOOR = 1e-5  # nats per token; below it a difference is one of summation order


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    reason: str = ""


def judge(candidate: Quality, default: Quality, fidelity: Fidelity, approx_limit: float | None) -> Verdict:
    """Args:
    fidelity: the worst of the knobs that differ.
    approx_limit: mean KLD in nats per token that the user allowed for `approx` knobs, if any.
    """
    if candidate.status is not TrialStatus.OK:
        return Verdict(False, candidate.message or str(candidate.status))
    if candidate.digest and candidate.digest == default.digest:
        return Verdict(True)
    if fidelity is Fidelity.EXACT:
        return Verdict(
            False, "answers differ from the default's, though only settings that change no bit differ"
        )
    limit = ROUNDING_FACTOR * default.mean_kld + ROUNDING_FLOOR
    if fidelity is Fidelity.APPROX:
        limit = max(limit, approx_limit or 0.0)
    # Written so that a KLD which is not a number fails.
    if not candidate.mean_kld <= limit:
        return Verdict(
            False, f"mean KLD {candidate.mean_kld:.3g} against the exact path, allowed is {limit:.3g}"
        )
    return Verdict(True)
