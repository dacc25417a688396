"""The sections of the page, from top to bottom."""

from __future__ import annotations

import json
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.protocol import TrialStatus, changed_text, counted, settings_text
from . import analyse, figures
from .analyse import estimate_of
from .elements import Page, ratio_cells, section, soft, table, text
from .read import Run, mapping, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.intervals import Estimate

_UNCLOSED = (
    "The journal has no closing record: the run was interrupted or killed, or is still running. This page "
    "shows its last state, and no choice below is final. `--resume` continues the run."
)


@dataclass
class Verdict:
    """The result of the run, or its current state."""

    outcome: dict[str, Any]
    settings: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    final: bool
    how: str


def verdict(run: Run, tried: Sequence[analyse.Tried]) -> Verdict:
    outcome = run.last("outcome")
    if outcome:
        entries = {k: mapping(v) for k, v in mapping(outcome.get("entries")).items()}
        return Verdict(outcome, mapping(outcome.get("settings")), entries, True, "chosen")
    without = run.last("without")
    if without:
        entries = {k: mapping(v) for k, v in mapping(without.get("entries")).items()}
        return Verdict(
            {},
            mapping(without.get("settings")),
            entries,
            False,
            "last ones of the ablation",
        )
    beating = [n for n in run.noted("finalist") if n.get("beats") is True and number(n.get("ratio"))]
    if beating:
        best = max(beating, key=lambda n: number(n.get("ratio")) or 0.0)
        return Verdict({}, mapping(best.get("settings")), {}, False, "best confirmed finalist")
    scored = [t for t in tried if t.ratio is not None]
    if scored:
        top = max(scored, key=lambda t: t.ratio or 0.0)
        return Verdict(
            {}, dict(top.settings), {}, False, f"best trial of the search, {top.ratio:.3f} ×, unconfirmed"
        )
    return Verdict({}, dict(run.defaults), {}, False, "only the default was measured")


def fill(page: Page, run: Run) -> None:
    tried = analyse.trials(run)
    found = verdict(run, tried)
    _top(page, run, found)
    at = len(page.parts)
    pair = _pair(run, found)
    _comparison(page, run, found, pair)
    _depths(page, run, pair)
    _rates(page, run, found)
    _history(page, run, tried)
    _importance(page, run, tried)
    _near_ties(page, run, tried, found)
    _quality(page, run, found)
    _kernels(page, run, found)
    _machine(page, run)
    _repeat(page, run)
    if page.missing:
        items = "".join(f"<li>{text(line)}</li>\n" for line in page.missing)
        page.parts.insert(at, section("Missing from this journal", f"<ul>\n{items}</ul>\n", kind="warn"))


def _label(run: Run) -> str:
    label = run.last("request").get("label")
    if isinstance(label, str) and label:
        return label
    device, model = mapping(run.identity.get("device")), mapping(run.identity.get("model"))
    engine = mapping(run.identity.get("engine"))
    names = [engine.get("device_name") or device.get("kind"), model.get("name") or model.get("architecture")]
    return " · ".join(str(n) for n in names if n) or Path(run.path).name


def _top(page: Page, run: Run, found: Verdict) -> None:
    label = _label(run)
    page.title = f"tune: {label}"
    if not run.head:
        page.missing.append("The first record (device, model, engine, workload, seed) is missing or damaged.")
    if not found.final:
        page.missing.append(_UNCLOSED)
    if run.damaged or run.odd:
        counts = (
            f"{counted(run.damaged, 'incomplete line')} and {counted(len(run.odd), 'inconsistent record')}"
        )
        page.missing += [f"{counts}: not shown.", *run.odd[:5]]
    for name in run.absent:
        page.missing.append(f"{name}, the journal of another device of this search, does not exist.")
    stage = run.last("stage").get("name")
    status = found.outcome.get("status", f"unfinished ({stage})" if stage else "unfinished")
    tiles = [("status", status), ("time", f"{run.seconds:,.0f} s"), ("operations", f"{run.operations:,}")]
    devices = number(run.head.get("devices")) or 1
    if devices > 1:
        tiles.append(("searched on", f"{devices:.0f} devices"))
    gain = mapping(found.outcome.get("gain"))
    for metric in run.metrics:
        estimate = estimate_of(mapping(gain.get(metric)))
        if estimate is not None:
            tiles.append((run.named(metric), f"{estimate.ratio:.3f} ×"))
    shown = "".join(f'<div class="tile"><span>{text(n)}</span><b>{text(v)}</b></div>\n' for n, v in tiles)
    target = text(run.identity.get("target", "unknown target"))
    workload = text(run.workload) if run.workload else "workload not recorded"
    listed = found.outcome.get("kernels")
    kernels = f" and {len(listed)} kernel choices" if isinstance(listed, list) and listed else ""
    chosen = text(changed_text(found.settings, run.defaults) + kernels, 2000)
    undone = f"<p>{text(left, 2000)}</p>\n" if (left := analyse.left_undone(found.outcome)) else ""
    verdict = f"<p><b>{text(said, 2000)}</b></p>\n" if (said := found.outcome.get("verdict")) else ""
    page.parts.append(
        f"<h1>{text(label)}</h1>\n{verdict}"
        f'<p class="soft">{target} · {workload} · settings {text(found.how)}: {chosen}</p>\n{undone}'
        f'<div class="tiles">\n{shown}</div>\n'
    )


def _margins(run: Run) -> dict[str, float]:
    """The margins that decided; for an unfinished run, the margins from A/A."""
    noted = mapping(run.last("outcome").get("margin")) or mapping(run.last("noise").get("margin"))
    return {m: x for m in run.metrics if (x := number(noted.get(m))) is not None}


def _chosen_kernels(found: Verdict) -> int:
    chosen = found.outcome.get("kernels")
    return len(chosen) if isinstance(chosen, list) else 0


def _pair(run: Run, found: Verdict) -> analyse.Paired | None:
    """The comparison of the choice with the default; None if the default was chosen."""
    kernels = _chosen_kernels(found)
    changed = kernels or found.settings != run.defaults
    return analyse.paired(run, found.settings, kernels) if changed else None


def _comparison(page: Page, run: Run, found: Verdict, pair: analyse.Paired | None) -> None:
    kernels = _chosen_kernels(found)
    margins = _margins(run)
    gain = {m: estimate_of(mapping(g)) for m, g in mapping(found.outcome.get("gain")).items()}
    rows: list[list[object]] = []
    marks: list[tuple[str, Estimate]] = []
    for metric in run.metrics:
        estimate = gain.get(metric) or (pair.ratio.get(metric) if pair else None)
        if estimate is not None:
            marks.append((run.named(metric), estimate))
        base, tuned = (_median(run, r.get(metric)) if r else "" for r in
                       ((pair.base, pair.rates) if pair else ({}, {})))  # fmt: skip
        margin = f"{100 * margins[metric]:.1f} %" if metric in margins else ""
        rows.append(
            [run.named(metric), base or _default_rate(run, metric), tuned, *ratio_cells(estimate), margin]
        )
    columns = ["metric", f"#default {run.unit}", f"#tuned {run.unit}", "#ratio", "#95 % interval", "#margin"]
    body = [table(columns, rows)]
    if pair:
        body.append(
            soft(f"Rates are medians of {pair.rounds} paired rounds ({pair.stage}); each round runs in its "
                "own process. A ratio is the median of paired ratios. A ratio within the margin is not a "
                "gain.")
        )  # fmt: skip
    elif found.settings == run.defaults and not found.final:
        body.append(soft("So far only the default was measured."))
    elif found.settings == run.defaults and not kernels:
        tried = any(True for _ in run.noted("trial"))
        why = "nothing was faster beyond the noise" if tried else "nothing else was tried"
        if tried and found.outcome.get("unproven") is True:
            why = "no gain is proven"
        body.append(soft(f"Every setting stays at its default: {why}."))
    else:
        page.missing.append(
            "These settings have not been compared with the default in two paired rounds yet."
        )
    entries, remarks = [], []
    for name, data in found.entries.items():
        estimate = estimate_of(data)
        value = data.get("value", found.settings.get(name, ""))
        default = data.get("default", run.defaults.get(name, ""))
        entries.append([name, value, default, *ratio_cells(estimate), data.get("group") or ""])
        if remark := str(data.get("note") or ""):
            remarks.append(soft(f"{name}: {remark}."))
        if estimate is not None:
            marks.append((f"{name}={value}", estimate))
    for note in run.noted("kernels"):
        estimate = estimate_of(note)
        if note.get("beats") is True and estimate is not None:
            marks.append((f"kernels for {note.get('group')}", estimate))
    if entries:
        columns = ["setting", "value", "default", "#ratio", "#95 % interval", "group"]
        body += ["<h3>Entries, each measured by leaving it out</h3>\n", table(columns, entries), *remarks]
    if marks:
        body.append(page.plot("forest", figures.forest(marks, max(margins.values(), default=None))))
        body.append(soft("Bars are 95 % intervals. The band is the largest margin around 1."))
    if pair:
        plots = "".join(
            f"<div>{page.plot(f'samples_{m}', figures.samples(run, pair, m))}</div>"
            for m in run.metrics if pair.rates.get(m)
        )  # fmt: skip
        body.append(f'<div class="pair">{plots}</div>\n')
    page.section("Default and tuned", *body)


def _median(run: Run, values: Sequence[float] | None) -> str:
    return run.value(statistics.median(values)) if values else ""


def _default_rate(run: Run, metric: str) -> str:
    rates = [analyse.median_rate(s, metric) for s in run.measurements if s.key.startswith("aa/p")]
    return _median(run, [r for r in rates if r is not None])


def _depths(page: Page, run: Run, pair: analyse.Paired | None) -> None:
    """The section on depths; nothing if the workload has only one depth per length."""
    lengths = analyse.over_depth(run, pair)
    if not lengths:
        return
    plots = "".join(
        f"<div>{page.plot(f'depth_{d.name}', figures.by_depth(run, d))}</div>\n" for d in lengths
    )  # fmt: skip
    crossed = [f"{d.name} near {depth:.0f}" for d in lengths for depth in d.crossings]
    body = [
        f'<div class="pair">{plots}</div>\n',
        soft(
            "Medians of the paired rounds, as in the table above."
            if pair
            else "The default compared with itself."
        ),
    ]
    if crossed:
        body.append(
            soft(f"Context lengths at which the faster configuration changes (dashed): {', '.join(crossed)}.")
        )
    page.section("Rates by depth", *body)


def _rates(page: Page, run: Run, found: Verdict) -> None:
    body: list[str] = []
    for metric in run.metrics:
        figure = figures.by_ubatch(run, metric, found.settings)
        if figure is None:
            continue
        body += [f"<h3>{text(run.named(metric))}</h3>\n", page.plot(f"ubatch_{metric}", figure)]
        lines, crossing = analyse.curves(run, metric)
        knob = analyse.threshold_knob(run)
        if crossing is not None:
            body.append(
                soft(
                    f"The two paths that {knob} selects from are equally fast near u-batch {crossing:.0f} "
                    "(dashed)."
                )
            )
        rows = [
            [c.name, f"{u:g}", run.value(rate), words_]
            for c in lines
            for u, (rate, words_) in c.points.items()
        ]
        body.append(table(["curve", "#u-batch", f"#best {run.unit}", "~with"], rows))
    if body:
        body.append(
            soft("Rates as measured, including drift and noise. Paired ratios decide, not these rates.")
        )
        page.section("Rates by u-batch", *body)
    elif "ubatch" in run.knobs:
        page.missing.append("Rates by u-batch: fewer than two values of ubatch were measured.")


def _history(page: Page, run: Run, tried: Sequence[analyse.Tried]) -> None:
    figure = figures.history(run, tried)
    if figure is None:
        page.missing.append("History: no trial was recorded.")
        return
    blocks = analyse.voids(run)
    body = [page.plot("history", figure)]
    if blocks:
        rows = [
            [b.block, f"{b.begin:.1f} … {b.end:.1f}", f"{100 * b.moved:.1f} %", len(b.measurements)]
            for b in blocks
        ]
        body += ["<h3>Voided blocks (shaded), which were measured again</h3>\n",
                 table(["#block", "#seconds", "#baseline moved", "#measurements dropped"], rows)]  # fmt: skip
    total = number(found_voided) if (found_voided := run.last("outcome").get("voided")) is not None else None
    if total is not None and total > len(blocks):
        body.append(soft(f"Measurements and blocks repeated in total: {total:.0f}."))
    failed = [
        [t.number, t.status, changed_text(t.settings, run.defaults), t.message]
        for t in tried
        if t.ratio is None
    ]
    rounds = [
        ["", s.measurement.status, changed_text(s.settings(), run.defaults), s.measurement.message]
        for s in run.measurements
        if s.measurement.status is not TrialStatus.OK and not s.key.startswith("screen/t")
    ]
    if failed or rounds:
        columns = ["#trial", "status", "~settings", "~why"]
        body += ["<h3>Failed trials</h3>\n", table(columns, [*failed, *rounds])]
    names = [run.named(m) for m in run.metrics]
    rows = [
        [t.number, f"{t.ratio:.4f}",
         *(f"{t.by_metric[m]:.4f}" if m in t.by_metric else "" for m in run.metrics),
         changed_text(t.settings, run.defaults)]
        for t in sorted((t for t in tried if t.ratio is not None), key=lambda t: -(t.ratio or 0.0))
    ]  # fmt: skip
    if rows:
        body += [
            "<h3>Trials, best first</h3>\n",
            table(["#trial", "#ratio", *("#" + n for n in names), "~settings"], rows),
        ]
    page.section("History", *body)


def _importance(page: Page, run: Run, tried: Sequence[analyse.Tried]) -> None:
    found, explained = analyse.effects(run, tried)
    if not found:
        page.missing.append("Importance of the knobs: there are too few trials with a result.")
        return
    line = (
        "Main effects of an additive model that is fitted to the ratios of the search. The rest is noise and "
        "interaction."
    )
    if explained is not None:
        line += f" It explains {100 * explained:.0f} % of the variation between trials."
    else:
        line += " There are too few trials to tell how well the model fits."
    rows = [
        [e.knob, value, f"{ratio:.4f}", e.counts[value]] for e in found for value, ratio in e.by_value.items()
    ]
    page.section(
        "Importance of the knobs", page.plot("importance", figures.importance(found)), soft(line),
        table(["knob", "value", "#effect on the ratio", "#trials"], rows),
    )  # fmt: skip


def _near_ties(page: Page, run: Run, tried: Sequence[analyse.Tried], found: Verdict) -> None:
    rows: list[list[object]] = []
    for tie in run.noted("tie"):
        ratio = number(tie.get("ratio"))
        if ratio is not None:
            rows.append(
                ["chosen, closer to the default", f"{ratio:.4f}", f"{tie.get('knob')}={tie.get('value')}"]
            )
    for challenger in run.noted("rival"):
        ratio = number(challenger.get("ratio"))
        if ratio is not None:
            why = "better" if challenger.get("better") is True else "equally good, and found first"
            instead = changed_text(mapping(challenger.get("instead_of")), run.defaults)
            rows.append([f"chosen instead of {instead}: {why}", f"{ratio:.4f}",
                         changed_text(mapping(challenger.get("settings")), run.defaults)])  # fmt: skip
    finalists = [(r, n) for n in run.noted("finalist") if (r := number(n.get("ratio"))) is not None]
    finalists = [(r, n) for r, n in finalists if not n.get("harmed")]
    left = mapping(
        mapping(found.outcome.get("missed")).get("settings")
    )  # not a tie, but unproven for lack of time
    taken = [found.settings, {**run.defaults, **left}]
    margin = max(_margins(run).values(), default=0.01)
    for source, pairs in (
        ("finalist", [(r, mapping(n.get("settings"))) for r, n in finalists]),
        ("screen", [(t.ratio, t.settings) for t in tried if t.ratio is not None]),
    ):
        best = max((r for r, _ in pairs), default=0.0)
        near = [(r, s) for r, s in pairs if r >= best * (1 - margin / 2) and s not in taken]
        for ratio, settings in sorted(near, key=lambda x: -x[0]):
            rows.append([source, f"{ratio:.4f}", changed_text(settings, run.defaults)])
    if rows:
        page.section(
            "Near-ties",
            soft(f"Configurations within half the margin ({50 * margin:.1f} %) of the best one of their "
                "stage. This machine cannot tell them apart. Of tied values, the one closest to the "
                "default wins."),
            table(["from", "#ratio", "~settings"], rows),
        )  # fmt: skip


def _quality(page: Page, run: Run, found: Verdict) -> None:
    if not run.qualities:
        page.missing.append("Quality gate: no answers were compared with the exact path.")
        return
    limit, approx = analyse.kld_limit(run)
    refused = [(mapping(n.get("settings")), str(n.get("reason", ""))) for n in run.noted("incorrect")]
    rows: list[list[object]] = []
    chosen_checked = False
    for checked in run.qualities:
        q, settings = checked.quality, dict(checked.configuration.settings)
        kernels = len(checked.configuration.kernels)
        is_default, is_chosen = (
            settings == run.defaults and not kernels,
            settings == found.settings and not kernels,
        )
        chosen_checked = chosen_checked or is_chosen
        who = "default" if is_default else ("chosen" if is_chosen else ("kernels" if kernels else ""))
        reason = next((r for s, r in refused if s and s == settings), "") or q.message
        ok = q.status is TrialStatus.OK
        numbers = (
            [f"{q.mean_kld:.3g}", f"{q.max_kld:.3g}", f"{100 * q.top1:.2f} %", q.tokens] if ok else [""] * 4
        )
        what = changed_text(settings, run.defaults) + (f" and {kernels} kernel choices" if kernels else "")
        rows.append([who, *numbers, "rejected: " + reason if reason else str(q.status), what])
    rows.sort(key=lambda r: ("default", "chosen", "kernels", "").index(str(r[0])))
    if not chosen_checked:
        page.missing.append("Quality gate: this journal has no check of exactly the settings shown.")
    lines = [
        "Answers are compared with the exact path (numerics: exact), with the routing pinned to its experts. "
        "KLD is in nats per token."
    ]
    if limit is not None:
        lines.append(f"Allowed mean KLD: {limit:.3g} (1.5 × that of the default + 1e-5). Settings that must "
                     "not change any bit are compared bit by bit.")  # fmt: skip
    if approx is not None:
        lines.append(f"Settings that change answers were allowed up to a mean KLD of {approx:g}.")
    columns = ["", "#mean KLD", "#max KLD", "#same top token", "#tokens", "verdict", "~settings"]
    page.section("Quality gate", soft(" ".join(lines)), table(columns, rows))


def _kernels(page: Page, run: Run, found: Verdict) -> None:
    groups: list[list[object]] = []
    for note in run.noted("kernels"):
        beats = "accepted" if note.get("beats") is True else "no gain inside the engine, not accepted"
        groups.append(
            [note.get("group", ""), note.get("choices", ""), *ratio_cells(estimate_of(note)), beats]
        )
    listed = found.outcome.get("kernels")
    choices = [
        [k.get("key", ""), k.get("tokens", ""),
         settings_text(mapping(k.get("config"))),
         k.get("screened", "alone"), *ratio_cells(estimate_of(mapping(k.get("in_place")))),
         *ratio_cells(estimate_of(mapping(k.get("alone"))))]
        for k in map(mapping, listed if isinstance(listed, list) else [])
    ]  # fmt: skip
    trials = _kernel_trials(run)
    if groups or choices or trials:
        body = []
        if groups:
            body.append(table(["group", "#choices", "#ratio", "#95 % interval", "verdict"], groups))
        if choices:
            columns = [
                "~op", "tokens", "~configuration", "first measured", "#inside the engine", "#95 % interval",
                "#alone", "#95 % interval",
            ]  # fmt: skip
            body.append(table(columns, choices))
        if trials:
            body += [
                "<h3>Trials inside the engine</h3>\n",
                soft("Ratio of short runs of the engine with this kernel to runs without it; both have the "
                     "kernels kept earlier. The best of each block is measured again and has an interval."),
                table(["~op", "tokens", "~configuration", "#ratio", "#95 % interval", "verdict"], trials),
            ]  # fmt: skip
        page.section("Kernels, confirmed inside the engine", *body)


def _kernel_trials(run: Run) -> list[list[object]]:
    rows: list[list[object]] = []
    for note in run.noted("kernel_trial"):
        again = estimate_of(note)
        ratio = number(note.get("ratio"))
        verdict = f"{note['status']}: {note.get('message', '')}" if "status" in note else ""
        if "kept" in note:
            verdict = "kept" if note["kept"] is True else "not confirmed"
        cells = ratio_cells(again) if again else ["" if ratio is None else f"{ratio:.4f}", ""]
        config = settings_text(mapping(note.get("config")))
        rows.append([note.get("key", ""), note.get("tokens", ""), config, *cells, verdict])
    return rows


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _machine(page: Page, run: Run) -> None:
    body: list[str] = []
    for name in ("device", "model", "engine"):
        data = mapping(run.identity.get(name))
        rows = [
            [k, json.dumps(v, ensure_ascii=False) if isinstance(v, dict | list) else v]
            for k, v in data.items()
        ]
        if rows:
            body.append(f"<div><h3>{name.capitalize()}</h3>\n{table([name, '~value'], rows)}</div>\n")
    for count, note in enumerate(run.noted("machine"), 1):
        rows = [[k, v] for k, v in note.items() if k != "note"]
        title = "State at the start" if count == 1 else f"State at continuation {count - 1}"
        body.append(f"<div><h3>{title}</h3>\n{table(['state', '~value'], rows)}</div>\n")
    rows = [
        [kind, str(note["message"])]
        for kind in (
            "throttled",
            "power_limited",
            "spill",
            "company",
            "clock",
            "storage",
            "disturbed",
            "moved_cpus",
        )
        for note in run.noted(kind)
        if isinstance(note.get("message"), str)
    ]
    if rows:
        body.append(f"<div><h3>Disturbances of the run</h3>\n{table(['kind', '~message'], rows)}</div>\n")
    noise, below = run.last("noise"), ""
    kinds = ["within", "between", "drift", "margin"]
    rows = [
        [run.named(m), *(_percent(number(mapping(noise.get(k)).get(m))) for k in kinds)]
        for m in run.metrics
    ]  # fmt: skip
    if noise:
        names = ["metric", "#within a process", "#between processes", "#drift", "#margin from A/A"]
        heading = "<h3>Noise: the default compared with itself (A/A)</h3>"
        below = f"{heading}\n{table(names, rows)}\n"  # half of the width is too narrow
    else:
        page.missing.append(
            "Noise: the default has not been compared with itself yet, so there is no margin."
        )
    if not any(run.noted("machine")):
        page.missing.append("State of the machine (load, huge pages, NUMA): not recorded for this target.")
    page.section("Machine and environment", f'<div class="pair">{"".join(body)}</div>\n{below}')


def repeat_command(run: Run) -> tuple[str, str]:
    """The command of the run without --resume, and a remark, which is empty for a recorded command. Without a
    recorded command, it is reconstructed from the first record, and may be empty."""
    recorded = next((n["command"] for n in run.noted("request") if isinstance(n.get("command"), str)), "")
    if recorded:
        try:
            return shlex.join(w for w in shlex.split(recorded) if w != "--resume"), ""
        except ValueError:
            return recorded, ""
    target = str(run.identity.get("target", "dyno"))
    if target == "replay" and run.workload is not None:
        metric = run.metrics[0]
        parts = ["tune", "replay", "SWEEP.jsonl", "--metric", f"{metric}{run.workload.tokens(metric)}"]
        if run.head.get("sampler") is not None:
            parts += ["--sampler", str(run.head["sampler"])]
        return shlex.join(
            parts
        ), "The journal has no command. This command repeats such searches on the file of the sweep."
    if target not in ("dyno", "replay"):
        return "", (
            f"The journal has no command: a run of the target {target!r} is started from Python. Seed "
            f"{run.head.get('seed')}, sampler {run.head.get('sampler')}, workload {run.workload}."
        )
    parts = ["tune", "--model", "MODEL.gguf"]
    if run.workload is not None:
        parts += ["--workload", str(run.workload)]
    for option, name in (("--seed", "seed"), ("--sampler", "sampler"), ("--allow-approx", "approx_limit")):
        if run.head.get(name) is not None:
            parts += [option, str(run.head[name])]
    for name, value in mapping(run.head.get("held")).items():
        parts += ["--set", f"{name}={value}"]
    return shlex.join(parts), (
        "The journal has no command; this one is reconstructed from its first record. Replace MODEL.gguf by "
        "the file of the model. The budget was not recorded."
    )


def _repeat(page: Page, run: Run) -> None:
    command, remark = repeat_command(run)
    note = soft(remark) if remark else ""
    if command:
        note += f"<pre>{text(command, 4000)}</pre>\n"
    report = shlex.join(["tune", "report", Path(run.path).name])
    page.section(
        "Repeat this run", note,
        soft(f"This page: {report} · journal sha256 {run.sha256} · tuner {run.head.get('tuner', 'unknown')}"),
    )  # fmt: skip
