"""The result of a tune in one sentence, and the gains that remain unproven."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.options import ENERGY, MEMORY
from ..core.protocol import settings_text
from ..core.workload import kind_of
from ..decide.answer_check import rounding_limit
from ..measure.paired_rounds import WIDEST_MARGIN

if TYPE_CHECKING:
    from ..core.outcome import Outcome

WORDS = {"pp": "prompt processing", "tg": "generation"}
UNPROVEN = "Nothing is proven"
"""The beginning of a verdict that continues with the reason: noise or lack of time."""


def verdict(outcome: Outcome) -> str:
    """The gain of a tune and its effect on the answers, or the reason why there is no gain."""
    if outcome.afterwards and outcome.objective != MEMORY:
        ended = replace(outcome, status=outcome.finished or "complete", afterwards="")
        return f"{verdict(ended)} {outcome.afterwards}"
    if not outcome.entries and not outcome.kernels:
        return _nothing(outcome)
    moved = {m: g for m, g in outcome.gain.items() if m not in outcome.untouched}
    gains = [f"{_word(metric)} {gain.ratio:.2f} ×" for metric, gain in moved.items()]
    what = compared(outcome.objective)
    said = ", ".join([f"{gains[0]} {what}", *gains[1:]]) if gains else "the profile changes settings"
    if outcome.memory:
        usual, size = outcome.memory
        speeds = f": {', '.join([f'{gains[0]} {what}', *gains[1:]])}" if gains else ""
        said = (
            f"the plan needs {size / 2**20:,.0f} MiB instead of {usual / 2**20:,.0f} ({size / usual:.2f} ×), "
            f"and no metric is slower{speeds}"
        )
    said += _answers(outcome)
    return f"{said[0].upper()}{said[1:]}."


def _answers(outcome: Outcome) -> str:
    tuned, default = outcome.quality, outcome.default_quality
    if tuned is None or default is None:
        return ""
    if tuned.digest and tuned.digest == default.digest:
        return "; the answers are identical"
    same = tuned.mean_kld <= rounding_limit(default.mean_kld)
    change = "are unchanged" if same else "change within the limit of --allow-approx"
    return f"; the answers {change} (KLD {tuned.mean_kld:.1g}, default {default.mean_kld:.1g})"


def _nothing(outcome: Outcome) -> str:
    margin = max(outcome.margin.values(), default=0.0)
    interrupted = outcome.status == "interrupted"
    if not outcome.noise:
        why = "the budget ended before the noise of this machine was known"
        if interrupted:
            why = "the tune was interrupted before the noise of this machine was known; --resume continues it"
        return f"Nothing was measured: {outcome.too_short.get('message', why)}."
    noise = f"the noise of this machine ({100 * margin:.1f} %)"
    tried = max(0, outcome.trials - 1)
    if not tried and not outcome.kernel_defaults and not outcome.promises and not interrupted:
        return (
            f"Nothing but the default was tried{': the budget ended' if outcome.status == 'budget' else ''}."
        )
    if too_noisy(outcome):
        wide = [p for p in outcome.promises if "margin" in p]
        ended = wide[0]["margin"] if wide else min(outcome.margin.values())
        by = "a longer --budget or a quieter machine reduces it"
        if only_quiet(outcome):
            by = "only a quieter machine reduces it enough"
        return (
            f"{UNPROVEN}: the noise margin at the end was {_percent(ended)}, and a proof needs a margin of "
            f"at most {_percent(WIDEST_MARGIN)}; {by}."
        )
    if outcome.objective == MEMORY:
        return _nothing_saved(outcome, tried)
    if interrupted and outcome.unproven:
        return f"{UNPROVEN}: the tune was interrupted before a gain was proven; --resume continues it."
    if outcome.unanswered:
        looked = f"some settings looked {better(outcome.objective)}"
        return f"{UNPROVEN}: {looked}, but {outcome.unanswered}. Tune again."
    if outcome.unanswered_kernels and not outcome.unproven:
        return f"{UNPROVEN}: some kernels looked faster, but {outcome.unanswered_kernels}. Tune again."
    needed = any("needed" in p for p in outcome.promises)
    if outcome.unproven or needed:
        longer = "" if needed or outcome.status != "budget" else " Give a longer --budget."
        return (
            f"{UNPROVEN} to gain more than {noise}: the time ran out before settings that looked "
            f"{better(outcome.objective)} could be proven.{longer}"
        )
    if interrupted:
        return f"{UNPROVEN} yet: the tune was interrupted during the kernel stage; --resume continues it."
    counted = f"{tried} other configuration{'s' if tried != 1 else ''}"
    counted += f" and other kernels for {len(outcome.kernel_defaults)} ops" if outcome.kernel_defaults else ""
    were = "was" if tried == 1 and not outcome.kernel_defaults else "were"
    said = f"Nothing gains more than {noise}: {counted} {were} slower than the defaults or tied with them."
    untried = [name for name in outcome.defaults if name not in outcome.searched]
    if untried and outcome.status == "budget":
        said += f" The time ran out before {', '.join(untried)} could be tried: give a longer --budget."
    return said


def _nothing_saved(outcome: Outcome, tried: int) -> str:
    """The verdict for the objective memory, for which faster settings do not count."""
    said = "Nothing is proven to need less memory at the speed of the default: "
    if outcome.status == "interrupted":
        return f"{said}the tune was interrupted before smaller settings were compared with the default."
    said += f"{tried} other configuration{'s were' if tried != 1 else ' was'} tried."
    return f"{said} Give a longer --budget." if outcome.status == "budget" else said


def compared(objective: str) -> str:
    """The words after a ratio, as in 1.20 × as fast."""
    return "the tokens per joule" if objective == ENERGY else "as fast"


def over_defaults(objective: str) -> str:
    """The words after a ratio to the defaults."""
    return "the defaults' tokens per joule" if objective == ENERGY else "as fast as the defaults"


def better(objective: str) -> str:
    return "better" if objective == ENERGY else "faster"


def too_noisy(outcome: Outcome) -> bool:
    """Whether the noise of all metrics, or of all metrics of a faster-looking configuration, exceeds the
    widest margin that allows a proof."""
    wide = any("margin" in p for p in outcome.promises)
    return wide or (bool(outcome.margin) and min(outcome.margin.values()) > WIDEST_MARGIN)


def only_quiet(outcome: Outcome) -> bool:
    """Whether the noise is too large for any budget, so that only a quieter machine allows a proof."""
    wide = [p for p in outcome.promises if "margin" in p]
    return bool(wide) and "needed" not in wide[0]


def not_proven(outcome: Outcome) -> list[str]:
    """A line for each unproven gain; none if memory decides, because faster settings then do not count."""
    if outcome.objective == MEMORY:
        return []
    lines = []
    for promise in outcome.promises:
        named = (
            f"{promise['kernels']} kernels for generation"
            if "kernels" in promise
            else settings_text(promise["settings"], ", ")
        )
        needed = f"; --budget {promise['needed']}s is enough for the proof" if "needed" in promise else ""
        ratio = f"{promise['ratio']:.3f} × {compared(outcome.objective)}"
        lines.append(f"Not proven: {named} looked {ratio}{needed}.")
    return lines


def _percent(share: float) -> str:
    """A percentage, never rounded down to a limit that it exceeds."""
    return f"{math.ceil(round(100 * share, 6))} %"


def record_of(outcome: Outcome) -> dict[str, Any]:
    """An outcome in the form of the journal and `--json`, with its verdict and its unproven gains."""
    said = {"verdict": verdict(outcome), "not_proven": not_proven(outcome)}
    return {**outcome.to_dict(), **said}


def _word(metric: str) -> str:
    """A metric in words. A metric of a mix keeps its numbers."""
    kind = kind_of(metric)
    return f"{WORDS[kind]} {metric.removeprefix(kind)}".strip() if kind in WORDS else metric
