"""Writes `benchmarks/REPORT.md` and its plots from the files in `benchmarks/results`.

    python benchmarks/report.py            # write the page and the plots
    python benchmarks/report.py --check    # exit code 1 if they are not what the files give

The page holds no number that is not in one of the files. Of several files of one kind the newest counts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from svg import bar, line, polyline, svg, text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UBATCHES = (128, 256, 512, 1024, 2048, 4096)
COLOURS = {"dyno": "#1668b8", "llama.cpp": "#d9822b", "ik_llama.cpp": "#7b53a6"}

Json = dict[str, Any]


def load(name: str) -> Json:
    loaded: Json = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return loaded


def table(head: list[str], rows: list[list[str]], numbers: bool = True) -> str:
    """A markdown table; all columns but the first are aligned to the right if they hold numbers."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def filled(page: str) -> str:
    """The page with its sentences in lines of 120 characters; tables, headings and pictures stay."""
    blocks = []
    for block in page.strip().split("\n\n"):
        if block.startswith(("|", "#", "!", "<!--")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        blocks.append("\n".join(
            textwrap.fill(
                " ".join(item.split()), 120, subsequent_indent="  " if item.startswith("- ") else "",
                break_long_words=False, break_on_hyphens=False,
            )
            for item in items
        ))  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def best_peer(peers: Json, model: str, cell: str) -> tuple[str, float]:
    """The faster of the other engines in a cell; an engine's own setting counts as that engine."""
    found = [(cells[cell], name) for name, cells in peers["models"][model].items() if cell in cells]
    value, name = max(found)
    return name, value


def whole_models() -> Json:
    """The newest file of `bench_models.py` that has all u-batches of the models of `peers_h200.json`."""
    peers = json.loads((ROOT / "benchmarks" / "peers_h200.json").read_text(encoding="utf-8"))
    found = []
    for path in sorted(RESULTS.glob("h200_five_models*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        models = {m["model"]: m["cells"] for m in data["models"]}
        full = all(f"pp4096 ub{u}" in cells for cells in models.values() for u in UBATCHES)
        if full and set(models) == set(peers["models"]):
            found.append((data["date"], path.name, data))
    date, name, data = max(found, key=lambda entry: entry[:2])
    return {"file": name, "date": date, "data": data, "peers": peers}


# ---- sections


def gpu_models(chosen: Json) -> str:
    data, peers, later = chosen["data"], chosen["peers"], load("h200_split_k.json")
    gpu = data["machine"]["gpu"]
    samples = len(data["models"][0]["cells"]["tg128"]["samples"])
    head = ["model", "engine", *(f"u-batch {u}" for u in UBATCHES), "tg128", "tg128 at 4096"]
    cells = [*(f"pp4096 ub{u}" for u in UBATCHES), "tg128", "tg128 d4096"]
    rows = []
    for model in data["models"]:
        name = model["model"]
        ours = []
        for cell in cells:
            median = model["cells"][cell]["median"]
            ours.append(f"{rate(median)} ({median / best_peer(peers, name, cell)[1]:.2f} ×)")
        rows.append([name, "**dyno**", *ours])
        for engine, of in peers["models"][name].items():
            rows.append(["", engine, *(rate(of[c]) if c in of else "–" for c in cells)])
    newest = []
    for name, of in later["five_models"].items():
        newest.append([name])
        for cell in ("pp4096 ub512", "pp4096 ub4096", "tg128"):
            newest[-1].append(f"{rate(of[cell])} ({of[cell] / best_peer(peers, name, cell)[1]:.2f} ×)")
    return f"""## Whole models on a GPU

{data["device"]}: {gpu["sm_count"]} SMs, driver {gpu["driver"]}, {gpu["power_limit_w"]:.0f} W, compute
capability {gpu["compute_capability"] / 10:.1f}. The models have synthetic weights in the shapes of the public
models. The cache is f16, and the other settings are the defaults. A cell holds tokens a second: the median
of {samples} samples. The number in brackets is the ratio to the faster of the other engines.

- dyno: `{chosen["file"]}`, {chosen["date"][:10]}, commit {data["commit"]}.
- {peers["engines"]}: `benchmarks/peers_h200.json`, {peers["date"]}, {peers["what"].rstrip(".")}.

{table(head, rows)}
![Prompts by u-batch](plots/gpu_prompts.svg)

A later build ({later["date"]}, commit {later["commit"]}, `h200_split_k.json`) was measured in three cells,
with each model's default cache:

{table(["model", "pp4096, u-batch 512", "u-batch 4096", "tg128"], newest)}"""


def sequences() -> str:
    data = load("h200_split_k.json")
    out = [
        "## Several sequences on a GPU\n",
        f"{data['device']}, {data['date']}, commit {data['commit']}: each step gives one token to every "
        "sequence (`h200_split_k.json`).\n",
    ]
    for name, steps in data["batches"].items():
        rows = []
        for count, of in steps.items():
            now = of.get("after", of["before"])
            seconds, tokens = now["step_us"] / 1000, now["tokens_per_second"]
            rows.append(
                [count, f"{seconds:.2f}", rate(tokens), f"{now['percent_of_weights_roofline']:.0f} %"]
            )
        head = [f"sequences of {name}", "ms a step", "tokens/s in all", "of the weights' roofline"]
        out.append(table(head, rows))
    out.append(drawn_steps())
    return "\n".join(out)


def drawn_steps() -> str:
    """Steps that draw a token for each sequence where the logits are."""
    data = load("h200_step_draws.json")
    rows = []
    for name, runs in data.items():
        if not isinstance(runs, dict) or "graph_concurrency_on" not in runs:
            continue
        for count, after in runs["graph_concurrency_on"].items():
            before = runs["graph_concurrency_off"][count]["logits_to_host"]["tokens_per_second"]
            now = after["drawn"]["tokens_per_second"]
            rows.append([name, count, rate(before), rate(now), f"{now / before:.2f}"])
    head = ["model", "sequences", "logits to the host, tokens/s", "drawn on the GPU, tokens/s", "ratio"]
    return (
        f"\nA later build ({data['date']}, commit {data['commit']}, `h200_step_draws.json`) draws the tokens "
        "on the GPU and runs q, k and v on parallel streams:\n\n" + table(head, rows)
    )


def other_engines() -> str:
    """Models that fit one GPU beside others: weight types, mixtures, steps of several sequences."""
    data = load("h100_engines.json")
    parts = []
    for title, models in data["groups"].items():
        cells = list(dict.fromkeys(cell for of in models.values() for cell in of["dyno"]["cells"]))
        present = [name for name in COLOURS if any(name in of for of in models.values())]
        rows: list[list[str]] = []
        ratios: dict[str, list[float]] = {}
        for name, engines in models.items():
            row = [name]
            for cell in cells:
                rates = {e: of["cells"][cell]["median"] for e, of in engines.items()}
                best = max(value for engine, value in rates.items() if engine != "dyno")
                ratios.setdefault(cell, []).append(rates["dyno"] / best)
                row += [
                    *(rate(rates[e]) if e in rates else "–" for e in present),
                    f"{rates['dyno'] / best:.2f} ×",
                ]
            rows.append(row)
        head = [title]
        for cell in cells:
            head += [f"{cell}, dyno", *present[1:], "ratio"]
        parts.append(table(head, rows))
        means = (
            f"{cell} {math.prod(of) ** (1 / len(of)):.2f} ({min(of):.2f})" for cell, of in ratios.items()
        )
        if len(models) > 2:
            parts.append(f"Geometric mean of the ratios, and in brackets the smallest: {', '.join(means)}.")
    versions = " and ".join(f"{name} {version}" for name, version in data["versions"].items())
    return f"""## Other engines on one GPU

{data["device"]}, {data["date"]}, dyno with its defaults (`h100_engines.json`). The other engines are
{versions}. They ran in turn with dyno, with flash attention, a batch of 4096 and a u-batch of 2048.
{data["note"]} The weights are random, in the shapes of the public models. The ratio is to the faster of the
other engines. A dash stands for an engine that does not read the type or was not measured.

{(chr(10) * 2).join(part.strip() for part in parts)}"""


def vram_limits() -> str:
    """A mixture of experts with less memory than it needs, beside the best of the other engines."""
    data = load("h100_vram_limits.json")
    rows = []
    for limit, engines in data["limits"].items():
        where = f"{limit} GiB" if float(limit) else "all experts in host memory"
        cells = [where]
        for cell in ("pp512", "pp4096", "tg64"):
            ours = engines["dyno"]["cells"][cell]["median"]
            others = {
                name: of["cells"][cell]["median"]
                for name, of in engines.items()
                if not name.startswith("dyno") and cell in of["cells"]
            }
            name = max(others, key=lambda name: others[name])
            cells += [rate(ours), f"{rate(others[name])} ({name})", f"{ours / others[name]:.2f} ×"]
        rows.append(cells)
    head = ["memory of the GPU"]
    for cell in ("pp512", "pp4096", "tg64"):
        head += [f"{cell}, dyno", "best other", "ratio"]
    return f"""## A model larger than the GPU's memory

{data["device"]}, {data["date"]}, {data["model"]}, {data["threads"]} threads (`h100_vram_limits.json`). dyno
places the weights by itself under `--vram`. The others run with a u-batch of 4096 and the smallest
`--n-cpu-moe` that stays within the limit. Each cell takes the best of llama.cpp and of ik_llama.cpp with and
without `-rtr 1`. With a smaller u-batch the others would have room for more experts: faster tokens, and
slower long prompts. That was not measured.

{table(head, rows)}"""


def cpu_models() -> str:
    data, busy = load("cpu_vs_llama_cpp.json"), load("cpu_busy_thread.json")
    machine = data["machine"]
    rows = []
    for row in data["rows"]:
        name, pp, tg = row["model"].removesuffix(".gguf"), row["pp512"], row["tg64"]
        rows.append([
            name, rate(pp["dyno"]), rate(pp["llama.cpp"]), f"{pp['ratio']:.2f} ×",
            rate(tg["dyno"]), rate(tg["llama.cpp"]), f"{tg['ratio']:.2f} ×",
        ])  # fmt: skip
    head = ["model", "pp512, dyno", "llama.cpp", "ratio", "tg64, dyno", "llama.cpp", "ratio"]
    loads = []
    for state in ("quiet", "busy"):
        for row in busy[state]["rows"]:
            name = row["model"].removesuffix(".gguf")
            for cell in sorted(c for c in row if c[:2] in ("pp", "tg") and c[2:].isdigit()):
                of = row[cell]
                other = max(of[e] for e in ("llama.cpp", "ik_llama.cpp"))
                loads.append([
                    name, cell, "no" if state == "quiet" else "one thread",
                    *(rate(of[e]) for e in COLOURS), f"{of['dyno'] / other:.2f} ×",
                ])  # fmt: skip
    second = busy["quiet"]["machine"]
    return f"""## Whole models on a CPU

{machine["cpu"]}, {machine["isa"]}, {data["threads"]} threads on {machine["cores"]} cores
(`cpu_vs_llama_cpp.json`; geometric mean of the ratios {data["geometric_mean"]:.2f}). The build of llama.cpp
comes from the package llama-cpp-python. A cell is one run.

{table(head, rows)}
{second["cpu"]}, {second["isa"]}, {busy["quiet"]["threads"]} threads on {second["cores"]} cores, on a quiet
machine and beside one busy thread of another program (`cpu_busy_thread.json`). The ratio is to the faster of
the other engines.

{table(["model", "cell", "other load", "dyno", "llama.cpp", "ik_llama.cpp", "ratio"], loads)}"""


def cpu_types() -> str:
    data = load("cpu_both_engines.json")
    rows = []
    for row in data["rows"]:
        cells = [row["model"].removesuffix(".gguf")]
        for test in ("pp512", "tg64"):
            of = row[test]
            ik = max(of[e] for e in of if e.startswith("ik_llama.cpp"))
            cells += [rate(of["dyno"]), rate(of["llama.cpp"]) if "llama.cpp" in of else "–", rate(ik)]
            cells.append(f"{of['ratio']:.2f} ×")
        rows.append(cells)
    head = ["model", *(f"{t}, {e}" if e == "dyno" else e for t in ("pp512", "tg64")
                       for e in ("dyno", "llama.cpp", "ik_llama.cpp", "ratio"))]  # fmt: skip
    versions = data["rows"][0]["versions"]
    commits = " and ".join(versions[e].split(" -")[0] for e in ("llama.cpp", "ik_llama.cpp -rtr 1 -fa 0"))
    return f"""## Weight types on a CPU

{data["machine"]["cpu"]}, {data["machine"]["isa"]}, {data["threads"]} threads, {data["date"]}
(`cpu_both_engines.json`). The machine has {data["machine"]["cores"]} cores. Seven comparisons ran at a time,
each on two cores of its own. So rates of two rows compare poorly; the engines of one row ran in turn. The
other engines are {commits}, built there for its processor. ik_llama.cpp ran with repacked rows and with flash
attention; the faster counts. llama.cpp does not read the types of ik_llama.cpp. The qwen3moe models have six
layers. The ratio is to the faster of both, and a cell is the median of two processes. For the types of two to
four bits the geometric mean of the ratios is {data["geometric_mean_low_bits"]:.2f}, and the smallest is
{data["smallest_low_bits"]:.2f}.

{table(head, rows)}"""


def cpu_depth() -> str:
    """Long prompts, and tokens behind them."""
    data = load("cpu_depth.json")
    rows = []
    for cache in data["caches"]:
        for row in cache["rows"]:
            for cell in sorted(c for c in row if c[:2] in ("pp", "tg") and c[2:].isdigit()):
                of = row[cell]
                ik = max(of[e] for e in of if e.startswith("ik_llama.cpp"))
                rows.append([
                    row["model"].removesuffix(".gguf"), cache["cache"], cell,
                    rate(of["dyno"]), rate(ik), f"{of['ratio']:.2f} ×",
                ])  # fmt: skip
    head = ["model", "cache", "cell", "dyno", "ik_llama.cpp", "ratio"]
    return f"""## Long contexts on a CPU

{data["machine"]["cpu"]}, {data["machine"]["isa"]}, {data["threads"]} threads on
{data["machine"]["cores"]} cores, {data["date"]} (`cpu_depth.json`). Tokens (tg) stand behind a prompt of
{data["depth"]} tokens. ik_llama.cpp {data["commit"]} was built there for its processor and ran with repacked
rows, with and without flash attention; the faster counts. The engines ran in turn on a quiet machine, in two
processes each; a cell is the median.

{table(head, rows)}"""


def cpu_servers() -> str:
    """dyno serve beside the servers of the other engines, each cell with the best of the others."""
    data = load("cpu_serve_peers.json")
    rows = []
    for clients, servers in data["clients"].items():
        ours = servers["dyno"]
        others = {name: each for name, each in servers.items() if name != "dyno"}
        most = max(others, key=lambda name: others[name]["output_rate"])
        soonest = min(others, key=lambda name: others[name]["ttft_p50"])
        rows.append([
            clients, rate(ours["output_rate"]), f"{rate(others[most]['output_rate'])} ({most})",
            f"{ours['output_rate'] / others[most]['output_rate']:.2f} ×",
            f"{1000 * ours['ttft_p50']:,.0f} ms",
            f"{1000 * others[soonest]['ttft_p50']:,.0f} ms ({soonest})",
        ])  # fmt: skip
    head = ["clients", "dyno, tokens/s", "best other", "ratio", "first token, dyno", "soonest other"]
    load_ = data["load"]
    where = "share the cores of the servers" if data.get("clients_share") else "have a core of their own"
    threads = "1 thread" if data["threads"] == 1 else f"{data['threads']} threads"
    return f"""## Servers on a CPU

{data["machine"]["cpu"]}, {data["date"]}, {data["model"]}, {threads} a server (`cpu_serve_peers.json`). The
servers run in turn, and the clients {where}. Prompts of {load_["pp"]} tokens share half, and answers have
{load_["tg"]} tokens; {load_["requests_of_a_client"]}. Each cell is one run. Tokens a second are all
output tokens of all clients. The first token is the median. The best of the others is llama.cpp
({data["commits"]["llama.cpp"]}) or ik_llama.cpp ({data["commits"]["ik_llama.cpp"]}), with their defaults or
with the option in the name.

{table(head, rows)}"""


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
    written, models = sum(gain["written"] for gain in gained), len({j["model"] for j in exhaustive["jobs"]})
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
  {len(gained) - written}. The intervals of {reach} changes reach beyond 1.05, so gains cannot be excluded
  ({exhaustive["side_by_side"]}; `exhaustive_gains.json`).
"""


def sources() -> str:
    rows = []
    for path in sorted(RESULTS.iterdir()):
        if path.suffix == ".json":
            data = json.loads(path.read_text(encoding="utf-8"))
            runs = data.get("runs")
            first = runs[0] if isinstance(runs, list) else data.get("quiet") or data
            about = data.get("command") or data.get("what") or data.get("about") or first.get("command")
            about = about or first.get("note") or "–"
            machine = data.get("machine")
            machine = machine if isinstance(machine, dict) else {}
            device = data.get("device") or machine.get("gpu_info") or machine.get("cpu")
            date = str(data.get("date") or "")[:10]
        elif path.name.endswith(".jsonl.gz") and "journal" not in path.name:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                first = json.loads(next(lines))
            about = "records of llama-bench's form, for `tune replay`"
            device = first.get("gpu_info") or first.get("cpu_info")
            date = str(first.get("test_time") or "")[:10]
        else:
            continue
        about = " ".join(str(about).split()).replace("|", "\\|")
        short = about if len(about) <= 110 else about[:107].rsplit(" ", 1)[0] + " …"
        rows.append([f"[{path.name}](results/{path.name})", date or "–", str(device or "–"), short])
    return f"""## The files

[README.md](README.md) describes the scripts that made them.

{table(["file", "date", "device", "command or content"], rows, numbers=False)}"""


# ---- plots


def prompts_plot(chosen: Json) -> str:
    """Prompts of 4096 tokens by u-batch: one panel a model, one line an engine."""
    data, peers = chosen["data"], chosen["peers"]
    wide, high = 230, 170
    parts = [text(20, 24, "Prompts of 4096 tokens by u-batch, tokens/s", kind="t")]
    for i, model in enumerate(data["models"]):
        left, top = 70 + (i % 3) * (wide + 80), 64 + (i // 3) * (high + 70)
        series = {"dyno": [model["cells"][f"pp4096 ub{u}"]["median"] for u in UBATCHES]}
        for engine in ("llama.cpp", "ik_llama.cpp"):
            of = peers["models"][model["model"]].get(engine, {})
            if all(f"pp4096 ub{u}" in of for u in UBATCHES):
                series[engine] = [of[f"pp4096 ub{u}"] for u in UBATCHES]
        most = max(max(values) for values in series.values())
        parts.append(text(left, top - 8, model["model"]))
        for step in range(5):
            value = most * step / 4
            y = top + high * (1 - step / 4)
            parts += [line(left, y, left + wide, y, "g"), text(left - 6, y + 4, rate(value), "end")]
        for n, ubatch in enumerate(UBATCHES):
            parts.append(text(left + wide * n / (len(UBATCHES) - 1), top + high + 16, str(ubatch), "middle"))
        for engine, values in series.items():
            places = [
                (left + wide * n / (len(UBATCHES) - 1), top + high * (1 - value / most))
                for n, value in enumerate(values)
            ]
            parts.append(polyline(places, COLOURS[engine]))
    bottom = 64 + ((len(data["models"]) + 2) // 3) * (high + 70)
    for i, (engine, colour) in enumerate(COLOURS.items()):
        parts += [bar(70 + i * 160, bottom - 30, 14, 4, colour), text(90 + i * 160, bottom - 24, engine)]
    return svg(1000, bottom, parts)


def tunes_plot() -> str:
    """The gain of the newest tune of each model, as fresh processes found it."""
    newest = {m["model"]: m for m in load("tune_h200.json")["models"]}
    left, step, wide = 210, 44, 480
    most = max(m["bench"][c]["ratio"] for m in newest.values() for c in ("pp4096", "tg64"))
    parts = [
        text(20, 24, "Speed with the tuned profile over the defaults, found by fresh processes", kind="t")
    ]
    for i, (name, model) in enumerate(sorted(newest.items())):
        y = 44 + i * step
        parts.append(text(left - 8, y + 20, name, "end"))
        for n, (cell, colour) in enumerate((("pp4096", COLOURS["dyno"]), ("tg64", COLOURS["llama.cpp"]))):
            ratio = model["bench"][cell]["ratio"]
            parts += [
                bar(left, y + 16 * n, wide * ratio / most, 13, colour),
                text(left + wide * ratio / most + 6, y + 16 * n + 11, f"{cell} {ratio:.3f} ×"),
            ]
    x = left + wide / most
    parts.append(line(x, 38, x, 44 + len(newest) * step, "a"))
    return svg(left + wide + 130, 60 + len(newest) * step, parts)


def pages() -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    chosen = whole_models()
    about = """# Benchmark report

<!-- Written by benchmarks/report.py from the files in benchmarks/results. Do not edit. -->

This page shows the newest measurements of each kind, with device, date and commit.
`python benchmarks/report.py` writes it from the files in `benchmarks/results`. Prompts are `ppN` (N tokens
are read), and generation is `tgN` (N tokens are generated, one at a time).
"""
    sections = [
        gpu_models(chosen),
        other_engines(),
        vram_limits(),
        sequences(),
        cpu_models(),
        cpu_types(),
        cpu_depth(),
        cpu_servers(),
        tunes(),
        method(),
        sources(),
    ]
    folder = ROOT / "benchmarks"
    return {
        folder / "REPORT.md": filled("\n\n".join(part.strip() for part in [about, *sections])),
        folder / "plots" / "gpu_prompts.svg": prompts_plot(chosen),
        folder / "plots" / "gpu_tunes.svg": tunes_plot(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a file is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for path, content in pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    if check and stale:
        print("run: python benchmarks/report.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
