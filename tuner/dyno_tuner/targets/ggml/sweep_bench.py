"""llama-sweep-bench of ik_llama.cpp, the only benchmark that takes all flags of the server, including `-op`.

It fills the context in steps of one u-batch. It times each step (pp) and a few generated tokens (tg) before
it. The time of a prompt is the sum of its steps.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.errors import TargetFailure
from ...core.protocol import TrialStatus
from .spelling import NoSpelling, spell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...core.protocol import Settings, Workload
    from .help import Help

_KEYS = ("n_kv", "pp", "tg", "t_pp", "t_tg")
_ROW = re.compile(r"^\|" + r"\s*([0-9.]+)\s*\|" * 7 + r"\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Sweep:
    """A run of llama-sweep-bench, and the way to read its output."""

    command: list[str]
    env: dict[str, str | None]
    metric: str
    first: int  # position of the first step to count
    steps: int
    size: int  # tokens of a step
    tokens: int
    rows: list[str] = field(default_factory=list)

    def seconds(self, text: str) -> float:
        """Seconds of the workload's tokens. Raises TargetFailure if a needed row is missing."""
        found = {int(row["n_kv"]): row for row in parse_rows(text)}
        wanted = [self.first + n * self.size for n in range(self.steps)]
        missing = [n for n in wanted if n not in found]
        if missing:
            raise TargetFailure(TrialStatus.CRASH, f"llama-sweep-bench printed no row for N_KV {missing[0]}")
        expected = self.size if self.metric == "pp" else self.tokens
        ran = {int(found[n][self.metric]) for n in wanted}
        if ran != {expected}:
            raise TargetFailure(
                TrialStatus.INVALID,
                f"{self.metric}: asked for steps of {expected}, llama-sweep-bench ran {sorted(ran)}",
            )
        total = sum(found[n][f"t_{self.metric}"] for n in wanted)
        if total <= 0:
            raise TargetFailure(TrialStatus.IMPLAUSIBLE, f"{self.metric}: {total} s for {self.tokens} tokens")
        return total


def sweep(
    tool: str, help_: Help, model: str, settings: Settings, workload: Workload, metric: str,
    *, batch: int, op_ids: Mapping[str, int], cuda: Mapping[str, str] | None = None,
) -> Sweep:  # fmt: skip
    """The command line of llama-sweep-bench for a workload, and the way to read its rows.

    Args: `help_`: help of that tool. Raises NoSpelling for a setting or workload without a flag."""
    size = min(int(settings["ubatch"]), workload.pp or int(settings["ubatch"]))
    if workload.depth % size or (metric == "pp" and workload.pp % size):
        raise NoSpelling(
            f"llama-sweep-bench goes in steps of a u-batch: pp={workload.pp} and depth={workload.depth} "
            f"must be multiples of {size}"
        )
    spelled = spell(
        {**settings, "ubatch": size}, "ik_llama.cpp", help_, bench=False, batch=batch, op_ids=op_ids,
        cuda=cuda,
    )  # fmt: skip
    steps = workload.pp // size if metric == "pp" else 1
    command = [tool, "-m", model, "-c", str(workload.depth + steps * size), "-n"]
    command.append("1" if metric == "pp" else str(workload.tg))
    if metric == "tg" and workload.depth and help_.has("--sweep-stride"):
        command += ["--sweep-stride", str(workload.depth // size)]  # rows in between only fill the context
    command += ["-wb"] if help_.has("-wb") else []
    command += ["--output-format", "jsonl"] if help_.has("--output-format") else []
    tokens = workload.tokens(metric)
    return Sweep([*command, *spelled.all_args()], spelled.env, metric, workload.depth, steps, size, tokens)


def parse_rows(text: str) -> list[dict[str, float]]:
    """Rows by key from JSON Lines, or from the table of older versions."""
    rows: list[dict[str, float]] = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a log line with a brace at its start
        if isinstance(row, dict) and all(isinstance(row.get(k), int | float) for k in _KEYS):
            rows.append({k: float(row[k]) for k in _KEYS})
    if rows:
        return rows
    order = ("pp", "tg", "n_kv", "t_pp", "s_pp", "t_tg", "s_tg")
    table = [dict(zip(order, map(float, found.groups()), strict=True)) for found in _ROW.finditer(text)]
    # Rates are printed with more digits than milliseconds.
    return [{**r, **{f"t_{m}": r[m] / r[f"s_{m}"] for m in ("pp", "tg") if r[f"s_{m}"] > 0}} for r in table]
