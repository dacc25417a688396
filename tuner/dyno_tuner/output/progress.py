"""The progress of a tune: a live view on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..core.protocol import changed_text, counted, settings_text
from ..space.memory_limits import gib

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

STAGES = {
    "noise": "noise: comparing the default with itself",
    "answers": "answers: computing exact answers, which every trial is compared with",
    "glimpse": "kernels: a first look at generation, to decide how much time to spend on them",
    "thresholds": "thresholds: measuring from which prompt size another kernel is faster",
    "screen": "search: checking the answers of other settings, then comparing their speed with the default",
    "finalists": "proof: comparing the best settings with the default in paired rounds",
    "kernels": "kernels: measuring each alone, then inside the engine, then in paired rounds",
    "pareto": "memory: proving settings that need less memory",
    "done": "done",
    "interrupted": "interrupted",
}


_MESSAGES = frozenset({
    "too_short", "few_visits", "clock", "throttled", "power_limited", "spill", "company", "storage",
    "disturbed", "waiting", "moved_cpus",
})  # fmt: skip
"""Kinds of notes that are only a message for people."""


class Progress:
    """The progress view, which receives the notes of the recorder; see `Recorder.on_note`.

    Args:
        label: Name of the tuned device and model.
        budget: Seconds, or None.
        defaults: Values of settings that need not be shown.
        quiet: Print nothing.
    """

    def __init__(
        self,
        label: str,
        budget: float | None,
        *,
        defaults: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._label = label
        self._budget = budget
        self._defaults = defaults or {}
        self._quiet = quiet
        self._live_wanted = self._console.is_terminal and not quiet
        self._live: Live | None = None
        self._begun = time.monotonic()
        self._offset = 0.0
        self._stage = ""
        self._trials = 0
        self._failed = 0
        self._voided = 0
        self._best = (1.0, "the default")
        self._margin: Mapping[str, float] = {}
        self._confirmed: tuple[float, str] | None = None
        self._gpu = ""

    def __enter__(self) -> Self:
        if self._live_wanted:
            self._live = Live(
                get_renderable=self._view, console=self._console, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def resumed(self, seconds: float, records: int) -> None:
        self._offset = seconds
        self.say(f"continuing a run with {records} recorded operations and {seconds:.0f} s of tuning")

    def say(self, line: str) -> None:
        """Print one line, in any mode except quiet."""
        if not self._quiet:
            self._console.print(Text(line), soft_wrap=True)

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Show a note of the run."""
        plain = self._live is None
        if kind == "stage":
            self._stage = str(data["name"])
            if plain:
                self.say(f"[{self._elapsed():6.1f} s] {STAGES.get(self._stage, self._stage)}")
        elif kind == "noise":
            self._margin = data["margin"]
            margins = ", ".join(f"{m} {100 * x:.1f} %" for m, x in self._margin.items())
            if plain:
                self.say(f"  a gain must exceed the margin: {margins} (more rounds can reduce it)")
        elif kind == "trial":
            self._trial(data, plain)
        elif kind == "threshold" and plain:
            self._threshold(data)
        elif kind == "void":
            self._voided += 1
            if plain:
                moved = 100 * data["moved"]
                self.say(
                    f"  repeating block {data['block']}: the speed of the default changed by "
                    f"{moved:.1f} % during the block"
                )
        elif kind == "finalist":
            self._finalist(data, plain)
        elif kind == "kernels" and plain:
            verdict = "accepted" if data["beats"] else "no gain inside the engine, not accepted"
            screened = f" (screened {data['screened']})" if "screened" in data else ""
            self.say(
                f"  {data['choices']} kernel choices for {data['group']}{screened}: "
                f"{data['ratio']:.3f} ×, {verdict}"
            )
        elif kind == "whole" and plain and "gain" in data:
            gains = ", ".join(f"{m} {g['ratio']:.3f} ×" for m, g in data["gain"].items())
            verdict = "accepted" if data["taken"] else "rejected as a whole"
            self.say(f"  the whole profile compared with the default: {gains}, {verdict}")
        elif kind == "pareto" and plain:
            self.say(f"  {data['name']}: {data['ratio']:.3f} × in {gib(data['size'])}")
        elif kind == "gpu":
            self._gpu = _gpu(data)
        elif kind in _MESSAGES:
            self.say(f"  {data['message']}")
        elif kind == "kernels_cut" and plain:
            self.say(f"  the time was enough to measure {data['done']} of {data['of']} ops alone")
        elif kind == "kernels_alone" and plain:
            self.say("  no time to try generation kernels inside the engine: their times alone decide")
        elif kind == "kernels_small" and plain:
            kernels, promise = counted(data["choices"], "kernel"), f"{data['promise']:.4f} × at most"
            self.say(
                f"  {kernels} for {data['group']} can gain {promise}; "
                f"a confirmation needs {data['enough']:.4f} ×"
            )
        elif kind == "kernels_dropped" and plain:
            self.say(f"  no time to confirm the kernels for {data['group']} as well")
        elif kind == "kernels_together" and plain:
            verdict = (
                f"{data['ratio']:.3f} × inside the engine" if data["kept"] else "no gain inside the engine"
            )
            self.say(
                f"  {data['choices']} generation kernels that were faster alone, tried together: {verdict}"
            )
        elif kind == "kernel_trial" and plain:
            self._kernel_trial(data)
        elif kind == "kernels_in_place" and plain:
            failed = f", {data['failed']} failed" if data["failed"] else ""
            cut = "" if data["ended"] == "complete" else f" ({data['ended']})"
            self.say(
                f"  generation inside the engine: {counted(data['trials'], 'trial')} for {data['ops']} of "
                f"{counted(data['of'], 'op')}{failed}, {counted(data['kept'], 'kernel')} kept{cut}"
            )
        elif kind == "incorrect" and plain:
            self.say(f"  answers rejected: {data['reason']}")

    def _kernel_trial(self, data: Mapping[str, Any]) -> None:
        """Show a kernel trial only if the kernel was kept or failed, because there are many."""
        what = f"{data['key']} {data['tokens']} {settings_text(data['config'])}"
        if "status" in data:
            self.say(f"  {data['status']:<11} {what}: {data['message']}")
        elif data.get("kept"):
            self.say(f"  {data['ratio']:.3f} × inside the engine: {what}")

    def _trial(self, data: Mapping[str, Any], plain: bool) -> None:
        self._trials = max(self._trials, int(data["number"]))
        ratio = data["ratio"]
        named = changed_text(data["settings"], self._defaults)
        if ratio is None:
            self._failed += 1
            if plain:
                self.say(f"  {data['number']:3d}  {data['status']:<11} {named}: {data['message']}")
            return
        if ratio > self._best[0]:
            self._best = (ratio, f"{_interval(data)}   {named}, not confirmed")
        if plain:
            self.say(f"  {data['number']:3d}  {ratio:6.3f} × {_interval(data)}  {named}")

    def _finalist(self, data: Mapping[str, Any], plain: bool) -> None:
        verdict = "beats the default" if data["beats"] else "does not beat the default"
        if harmed := data.get("harmed"):
            verdict = ", ".join(f"slower at {m}: {ratio:.3f} ×" for m, ratio in harmed.items())
        if data["rounds"] < 2:
            verdict = "no time left for confirmation"
        found = f"{data['ratio']:.3f} × {_interval(data)}"
        named = changed_text(data["settings"], self._defaults)
        if data["beats"] and (self._confirmed is None or data["ratio"] > self._confirmed[0]):
            self._confirmed = (data["ratio"], f"{found}   {named}")
        if plain:
            self.say(f"  {named}: {found}, {verdict}")

    def _threshold(self, data: Mapping[str, Any]) -> None:
        if data["verdict"] == "budget":
            self.say(f"  {data['knob']}: no time to measure it directly; the search tries its values instead")
            return
        words = {"tie": "no difference", "always": "the path below is faster at every u-batch",
                 "never": "the path above is faster at every u-batch"}  # fmt: skip
        found = words.get(str(data["verdict"]))
        if found is None:
            found = f"the path below is faster up to {data['tokens'][data['below'] - 1]} tokens"
        self.say(
            f"  {data['knob']}={data['value']}: {found} ({counted(data['measurements'], 'measurement')})"
        )

    def _elapsed(self) -> float:
        return self._offset + time.monotonic() - self._begun

    def _view(self) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_row("stage", STAGES.get(self._stage, self._stage))
        table.add_row("best so far", Text(f"{self._best[0]:.3f} × default   {self._best[1]}"))
        if self._confirmed is not None:
            table.add_row("confirmed", Text(self._confirmed[1]))
        table.add_row(
            "trials", f"{self._trials}, {self._failed} failed; {counted(self._voided, 'block')} repeated"
        )
        if self._margin:
            table.add_row("margin", ", ".join(f"{m}: {100 * x:.1f} %" for m, x in self._margin.items()))
        if self._gpu:
            table.add_row("GPU", self._gpu)
        elapsed = self._elapsed()
        if self._budget:
            left = max(0.0, self._budget - elapsed)
            table.add_row("time", f"{elapsed:.0f} s, at most {left:.0f} s left")
            bar = ProgressBar(total=self._budget, completed=min(elapsed, self._budget), width=50)
            return Group(Text(f"tune · {self._label}", style="bold"), table, bar)
        table.add_row("time", f"{elapsed:.0f} s")
        return Group(Text(f"tune · {self._label}", style="bold"), table)


def _gpu(data: Mapping[str, Any]) -> str:
    """The last window: temperature, clocks, power, other processes, and the number of dropped windows."""
    words = []
    if "temperature_c" in data:
        words.append(f"{data['temperature_c'][1]:.0f} °C")
    if "sm_mhz" in data:
        low, high = data["sm_mhz"]
        words.append(f"{low:.0f} to {high:.0f} MHz")
    if "power_w" in data:
        limit = f" of {data['power_limit_w']:.0f}" if data["power_limit_w"] else ""
        words.append(f"{data['power_w'][1]:.0f}{limit} W")
    if data["dropped"]:
        words.append(f"{data['dropped']} throttled measurements dropped")
    if data["others"]:
        words.append(f"{len(data['others'])} other processes")
    return ", ".join(words)


def _interval(data: Mapping[str, Any]) -> str:
    low, high = data["ci95"]
    return f"[{low:.3f}, {high:.3f}]"
