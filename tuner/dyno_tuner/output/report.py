"""The final tables of a tune, with the same numbers as in the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ..core.options import ENERGY, MEMORY
from ..core.protocol import counted, settings_text
from ..space.memory_limits import gib
from .verdict import UNPROVEN, better, not_proven, over_defaults, verdict

if TYPE_CHECKING:
    from rich.console import Console

    from ..core.outcome import Outcome, Screened
    from ..core.protocol import Workload


def _screened(how: Screened) -> str:
    ratio = how.in_situ or how.alone
    return f"{how.how} {ratio.ratio:.3f}" if ratio is not None else how.how


def print_outcome(outcome: Outcome, workload: Workload, console: Console) -> None:
    """Print the verdict, the entries, the speed before and after, and failures."""
    console.print(verdict(outcome), style="bold", soft_wrap=True)
    table = Table(title="Settings", title_justify="left")
    for column in ("setting", "value", "default", "ratio", "95 % interval", "moves"):
        table.add_column(
            column, justify="left" if column in ("setting", "moves") else "right", overflow="fold"
        )
    entries = {e.name: e for e in outcome.entries}
    for name in outcome.judged:
        entry = entries.get(name)
        if entry is None:
            table.add_row(name, "default", str(outcome.defaults.get(name, "")), "", "", "")
        else:
            e = entry.estimate
            moves = ", ".join(entry.moves) + (f" ({entry.group})" if entry.group else "")
            table.add_row(
                name,
                str(entry.value),
                str(entry.default),
                f"{e.ratio:.3f}",
                f"{e.low:.3f} … {e.high:.3f}",
                moves,
            )
    if table.row_count:
        console.print(table)
    if outcome.kernels:
        console.print("Kernels", style="italic")
    for kernel in outcome.kernels:  # lines, because op keys and configurations are wider than columns
        console.print(
            f"  {kernel.estimate}  {kernel.choice.key} {kernel.choice.tokens}: "
            f"{settings_text(kernel.choice.config)} ({kernel.group}; {_screened(kernel.screened)})",
            soft_wrap=True,
            markup=False,
        )
    for entry in outcome.entries:
        if entry.note:
            console.print(f"{entry.name}: {entry.note}.", soft_wrap=True)
    _print_crossings(outcome, console)
    speed = Table(title="Speed", title_justify="left")
    ratio = "ratio of tokens/J" if outcome.objective == ENERGY else "ratio"
    for column in ("metric", "default t/s", "tuned t/s", ratio, "95 % interval", "margin"):
        speed.add_column(column, justify="left" if column == "metric" else "right", overflow="fold")
    for metric, rate in outcome.baseline.items():
        gain = outcome.gain.get(metric)
        speed.add_row(
            workload.label(metric), f"{rate:,.1f}", f"{outcome.tuned.get(metric, rate):,.1f}",
            f"{gain.ratio:.3f}" if gain else "1",
            f"{gain.low:.3f} … {gain.high:.3f}" + (" (no entry)" if metric in outcome.untouched else "")
            if gain
            else "",
            f"{100 * outcome.margin.get(metric, 0.0):.1f} %",
        )  # fmt: skip
    if speed.row_count:
        console.print(speed)
    _print_energy(outcome, workload, console)
    if outcome.memory:
        default, tuned = outcome.memory
        console.print(f"Planned memory: {gib(tuned)} instead of {gib(default)}.")
    if outcome.untouched:
        console.print(
            "(no entry): no entry of the profile affects this metric; its ratio shows the measurement error."
        )
    _print_unproven(outcome, console)
    if outcome.quality is not None and outcome.default_quality is not None and outcome.entries:
        console.print(
            f"Answers: mean KLD {outcome.quality.mean_kld:.2g} from the exact path "
            f"(default {outcome.default_quality.mean_kld:.2g}) over {outcome.quality.tokens} tokens."
        )
    kinds: dict[str, int] = {}
    for failure in outcome.failures:
        kinds[str(failure.status)] = kinds.get(str(failure.status), 0) + 1
    failed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    tried = "only the default" if outcome.trials <= 1 else f"{outcome.trials} configurations"
    console.print(
        f"Measured {tried} in {outcome.seconds:.0f} s"
        + (f"; failed: {failed}" if failed else "")
        + (f"; {counted(outcome.voided, *_REPEATED)} repeated" if outcome.voided else "")
        + (f"; {counted(outcome.unstable, 'measurement')} did not become stable" if outcome.unstable else "")
        + _ENDED.get(outcome.status, "")
    )
    for line in not_proven(outcome):
        console.print(line, soft_wrap=True)


_ENDED = {
    "budget": "; the budget ended before everything was tried",
    "interrupted": "; interrupted: --resume continues the run",
    "unproven": "; no setting that looked faster was proven",
}
_REPEATED = "measurement or block", "measurements or blocks"


def _print_unproven(outcome: Outcome, console: Console) -> None:
    """Print lines about settings that looked better but are not in the profile; nothing if memory decides,
    because faster settings then do not count."""
    if outcome.objective == MEMORY:
        return
    if outcome.unproven:
        if verdict(outcome).startswith(UNPROVEN):
            return
        longer = " Give a longer --budget." if outcome.status == "budget" and not outcome.unanswered else ""
        why = outcome.unanswered or "the time ran out before they could be proven"
        console.print(
            f"Some settings looked {better(outcome.objective)} than the defaults, but {why}: they are not "
            f"in the profile.{longer}"
        )
    elif outcome.missed:
        named = settings_text(outcome.missed["settings"], ", ")
        ratio = f"{outcome.missed['ratio']:.3f} × {over_defaults(outcome.objective)}"
        console.print(
            f"{named} together looked {ratio}; only part of this gain could be proven in time. To continue, "
            "give --resume and a longer --budget."
        )


def _print_energy(outcome: Outcome, workload: Workload, console: Console) -> None:
    """Print joules per token and watts of both sides, if they were counted."""
    if not outcome.joules:
        return
    table = Table(title="Energy (idle power included)", title_justify="left")
    for column in ("metric", "default J/token", "tuned J/token", "default W", "tuned W"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, (default, tuned) in outcome.joules.items():
        base = outcome.baseline.get(metric, 0.0)
        watts = default * base, tuned * outcome.tuned.get(metric, base)
        table.add_row(
            workload.label(metric), f"{default:.4g}", f"{tuned:.4g}", f"{watts[0]:.1f}", f"{watts[1]:.1f}"
        )
    console.print(table)


def _print_crossings(outcome: Outcome, console: Console) -> None:
    """Print the speed ratio of both paths of each threshold and, with experts, the routing during the
    measurement."""
    if not outcome.crossings:
        return
    sizes = sorted({n for c in outcome.crossings for n in c.ratios})
    table = Table(
        title="Thresholds: speed of the path below over the path above, by u-batch", title_justify="left"
    )
    table.add_column("threshold")
    table.add_column("path below is faster up to", justify="right")
    for n in sizes:
        table.add_column(f"{n}" if n else "prompt", justify="right")
    words = {"never": "never", "tie": "no difference"}
    for c in outcome.crossings:
        limit = words.get(str(c.verdict), "") or (f"{c.up_to}" + (" (all)" if c.verdict == "always" else ""))
        table.add_row(c.knob, limit, *(f"{c.ratios[n]:.3f}" if n in c.ratios else "" for n in sizes))
    console.print(table)
    if outcome.routing:
        r = outcome.routing
        console.print(
            f"Routing: {r['tokens']} tokens used {r['distinct']:g} experts ({r['source']}); "
            f"the busiest expert had {r['busiest_over_mean']:g} × the mean number of tokens."
        )
