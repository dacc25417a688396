"""The sections of the report on the tuner: its gains, and the evidence for its tunes."""

from __future__ import annotations

from report_text import load, percent, table


def tunes() -> str:
    data = load("tune_h200.json")
    rows = []
    for m in data["models"]:
        chosen = [f"{k} {v}" for k, v in m["settings"].items()]
        if m["kernels"]:
            chosen.append(f"{len(m['kernels'])} kernel" + "s" * (len(m["kernels"]) > 1))
        gains = []
        for cell in ("pp4096", "tg64"):
            claim, found = m["bench"][cell]["claimed"], m["bench"][cell]
            gains += [f"{claim['ratio']:.3f}" if claim else "–", f"{found['ratio']:.3f}"]
        rows.append(
            [m["model"], m["commit"], f"{m['seconds_tune']:.0f}", *gains, ", ".join(chosen) or "default"]
        )
    gpu = data["machine"]["gpu"]
    head = [
        "model",
        "commit",
        "seconds",
        "pp4096, tune",
        "fresh process",
        "tg64, tune",
        "fresh process",
        "written",
    ]
    return f"""## What a tune gains on a GPU

{data["machine"]["gpu_info"]}, driver {gpu["driver"]}, {data["date"][:10]} (`tune_h200.json`). Each row is one
tune. The ratios are speed with the profile over speed with the defaults: first as the tune wrote it, then as
`dyno bench` found it in fresh processes. The default u-batch was 512 then. Since 2026-11-24 it is up to 4096
on a GPU of this size, so that most of the gain of prompts is part of the defaults.

{table(head, rows)}
![Gains of tunes](plots/gpu_tunes.svg)
"""


def method() -> str:
    data, budgets, short = load("tuner_statistics.json"), load("tuner_budgets.json"), load("tuner_short.json")
    gate, disturbed = load("quality_gate.json"), load("disturbed_tunes.json")
    exhaustive = load("exhaustive_gains.json")
    rows = []
    for name, row in data["tunes"].items():
        rows.append([
            name, str(row["tunes"]), str(row["written"]), str(row["harmful"]), percent(row["entries_agree"]),
            percent(row["intervals_hold_truth"] / row["intervals"]) if row["intervals"] else "–",
            percent(row["regret_median"]),
            percent(row["regret_max"]), percent(row["margin_median"]),
        ])  # fmt: skip
    head = [
        "surface and noise", "tunes", "entries", "harmful", "two tunes agree", "intervals hold",
        "regret, median", "largest", "margin",
    ]  # fmt: skip
    nulls = sum(of["tunes"] for of in data["null"].values())
    changed = sum(of["changed"] for of in data["null"].values())
    searches = [
        [
            surface,
            *(percent(of[m]["within_2pct"], 0) for m in ("guided", "tpe_raw_means", "coordinate", "random")),
        ]
        for surface, of in data["regret"].items()
    ]
    spans = [
        [
            seconds, str(of["tunes"]), str(of["no_setting_written"]), percent(of["regret_mean"]),
            str(of["entries_truly_slower"]),
        ]
        for seconds, of in budgets["by_budget"].items()
    ]  # fmt: skip
    beside = [of for kind in disturbed["summary"].values() for of in kind.values()]
    counts = {key: sum(of[key] for of in beside) for key in ("tunes", "stopped", "entries", "false")}
    caught, runs = sum(s["caught"] for s in gate["shapes"]), sum(s["runs"] for s in gate["shapes"])
    looked = [of for job in exhaustive["jobs"] for of in job["exhaustive"].values()]
    changes = sum(len(of["settings"]) + of["kernels"] for of in looked)
    raced = [ratio for of in looked for ratio in of["rounds"].values()]
    reach = sum(high > 1.05 for _, _, high in raced)
    gained = [gain for job in exhaustive["jobs"] for gain in job["gains"]]
    written, missed, unclear = (sum(g["written"] is told for g in gained) for told in (True, False, None))
    models = len({j["model"] for j in exhaustive["jobs"]})
    untold = f" The rounds cannot tell for {unclear}." if unclear else ""
    noisy, interrupt, cramped = data["thresholds"]["noise 0.02"], data["interrupt"], data["budget"]
    recorded, simulated = short["recorded"]["all"], short["settings"]["all"]
    methods = ["surface", "dyno's search", "Optuna TPE on raw means", "coordinate sweeps", "random search"]
    return f"""## Whether a tune can be believed

`tuner_statistics.json` ({data["date"]}, {data["runs"]:,} runs): tunes of a simulated engine whose truth is
known.

- Of {nulls} tunes of identical configurations {changed} changed anything.
- With 2 % noise a crossing was located to one step of the grid in {percent(noisy["within_one_step"], 0)} of
  the runs, and a tie was called a tie in {percent(noisy["ties_called"], 0)}.
- The longest of {cramped["tunes"]} tunes with a cramped budget took {cramped["largest_share"]:.2f} budgets.
- After an interrupt {interrupt["valid"]} of {interrupt["tunes"]} results were valid profiles, and
  {interrupt["harmful"]} of their {interrupt["written"]} entries were harmful.

{table(head, rows)}
A harmful entry is truly slower than its default by more than the margin. Regret is the distance of the
written profile from the true optimum.

![Two fresh tunes agree](results/tuner_statistics.repeatability.svg)

The share of searches that come within 2 % of the optimum after as many measurements, by method:

{table(methods, searches)}
![Regret by method](results/tuner_statistics.regret.svg)

Short budgets on simulated engines whose processes load for seconds (`tuner_budgets.json`, commit
{budgets["commit"]}):

{table(["budget, s", "tunes", "wrote no setting", "mean regret", "entries truly slower"], spans)}
- Room for {short["visits"]} measurements is as good as ten minutes in {percent(recorded["as_good"], 0)} of
  {recorded["pairs"]} pairs on recorded sweeps, and in {percent(simulated["as_good"], 0)} of
  {simulated["pairs"]} pairs on simulated engines (`tuner_short.json`).
- The check of answers caught {caught} of {runs} kernels that are wrong on purpose and cost about 0.4 % of
  perplexity. It raised {gate["false_alarms"]} false alarms in {gate["sound_checks"]} checks
  (`quality_gate.json`).
- Of {counts["tunes"]} tunes beside real disturbances {counts["stopped"]} stopped and named the disturbance.
  The others wrote {counts["entries"]} entries, and {counts["false"]} of these were false
  (`disturbed_tunes.json`).
- In {len(exhaustive["jobs"])} jobs over {models} models every other value and kernel was measured alone,
  {changes:,} changes, and the best of them in paired rounds, {len(raced)} with the kernels that were best
  together. {len(gained)} gain more than 5 %. A tune of two minutes writes {written} of these and leaves out
  {missed}.{untold} The intervals of {reach} changes reach beyond 1.05, so gains cannot be excluded
  ({exhaustive["side_by_side"]}; `exhaustive_gains.json`).
"""
