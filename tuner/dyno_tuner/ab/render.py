"""A comparison as JSON, and as a Markdown table for a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.protocol import settings_text
from .compare import SAME, Compared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .run import Answers

_MEMORY = {"host_mib": "memory, host (MiB)", "gpu_mib": "memory, GPU (MiB)"}


def to_dict(
    result: Compared, answers: tuple[Answers, Answers] | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **facts,
        "rounds": result.rounds,
        "seconds": round(result.seconds, 1),
        "interrupted": result.interrupted,
        "verdict": result.verdict,
        "disturbed": bool((facts.get("machine") or {}).get("disturbed")),
        "metrics": {name: m.to_dict() for name, m in result.metrics.items()},
        **({} if result.objective is None else {"objective": result.objective.to_dict()}),
        "memory": {n: {"a": a, "b": b} for n, (a, b) in result.memory.items()},
        "energy": {
            metric: {
                source: {
                    side: {"joules_per_token": e.joules_per_token, "watts": e.watts}
                    for side, e in zip("ab", pair, strict=True)
                }
                for source, pair in by.items()
            }
            for metric, by in result.energy.items()
        },
        "answers": None if answers is None else {"a": answers[0].to_dict(), "b": answers[1].to_dict()},
        "samples": result.samples,
    }


def markdown(
    result: Compared, answers: tuple[Answers, Answers] | None, facts: Mapping[str, Any], changed: str
) -> str:
    """The table of a comparison in Markdown.

    Args: `changed`: the reason why B's answers are less close than A's; "" if they are not."""
    rows = ["| | A | B | B / A | 95 % interval | |", "|---|--:|--:|--:|:-:|---|"]
    for name, m in result.metrics.items():
        e = m.ratio
        verdict = m.verdict if m.verdict == SAME else f"**{m.verdict}**"
        rows.append(
            f"| {name} (t/s) | {m.a:,.1f} | {m.b:,.1f} | {e.ratio:.3f} | {e.low:.3f} to {e.high:.3f} | "
            f"{verdict} (margin {100 * m.margin:.1f} %) |"
        )
    if result.objective is not None:
        o, e = result.objective, result.objective.ratio
        verdict = o.verdict if o.verdict == SAME else f"**{o.verdict}**"
        rows.append(
            f"| weighted mean of the ratios | | | {e.ratio:.3f} | {e.low:.3f} to {e.high:.3f} | "
            f"{verdict} (margin {100 * o.margin:.1f} %) |"
        )
    for metric, by in result.energy.items():
        for source, (mine, its) in by.items():
            share = f"{its.joules_per_token / mine.joules_per_token:.3f}" if mine.joules_per_token > 0 else ""
            cells = " | ".join(f"{e.joules_per_token:.3g}; {e.watts:.0f}" for e in (mine, its))
            rows.append(f"| {metric}, {source.upper()} (J/token; W) | {cells} | {share} | | |")
    for name, (a, b) in result.memory.items():
        rows.append(f"| {_MEMORY[name]} | {a:,.0f} | {b:,.0f} | {b / a:.3f} | | |" if a > 0 else
                    f"| {_MEMORY[name]} | {a:,.0f} | {b:,.0f} | | | |")  # fmt: skip
    if answers is not None:
        first, other = answers
        alike = facts["a"]["engine"] == facts["b"]["engine"]
        whose = "A's" if alike else "its own"
        verdict = f"**{changed}**" if changed else "as near" if alike else ""
        rows += [
            f"| mean KLD, {whose} most exact path | {first.mean_kld:.3g} | {other.mean_kld:.3g} | | | "
            f"{verdict} |",
            f"| same most likely token | {100 * first.top1:.2f} % | {100 * other.top1:.2f} % | | | "
            f"{other.tokens:,} tokens |",
        ]
    lines = [*rows, ""]
    lines += [f"{side.upper()}: {_side(facts[side])}  " for side in ("a", "b")]
    lines += [
        f"{facts['model']} on {facts['device']}; {result.rounds} ABBA rounds of fresh processes, "
        f"{facts['workload']}.{' Interrupted.' if result.interrupted else ''}{_machine(facts)}",
        "",
        f"    {facts['command']}",
    ]
    return "\n".join(lines)


def _machine(facts: Mapping[str, Any]) -> str:
    """The state of the machine in all rounds, as sentences."""
    seen = facts.get("machine") or {}
    said = ""
    if seen.get("repeated"):
        said = (
            f" Others used the CPUs, or a hypervisor moved them, during {seen['repeated']} runs, and these "
            "runs were repeated."
        )
    if seen.get("disturbed"):
        said += " **Others used the CPUs during runs that count (--force): the verdicts are not proven.**"
    if seen.get("moved_cpus"):
        said += f" A hypervisor had moved the CPUs during {seen['moved_cpus']} runs that count."
    if "throttled" not in seen:
        return said
    words = []
    for name, unit in (("temperature_c", "°C"), ("sm_mhz", "MHz")):
        if name in seen:
            low, high = seen[name]
            words.append(f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}")
    words.append(f"{seen['throttled']} throttled measurements repeated")
    words.append(f"{seen['other_processes']} other processes used it")
    return f"{said} The GPU: {', '.join(words)}."


def _side(facts: Mapping[str, Any]) -> str:
    words = [f"{facts['engine']} {facts.get('version', '')}".strip()]
    for key in ("commit", "build", "binaries", "profile"):
        if facts.get(key):
            words.append(f"{key} `{facts[key]}`")
    if facts.get("fallbacks"):
        words.append(f"**not taken from the profile: {'; '.join(facts['fallbacks'])}**")
    if facts.get("settings"):
        words.append(settings_text(facts["settings"]))
    return ", ".join(words)
