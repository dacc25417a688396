"""The sections of the report on GPUs."""

from __future__ import annotations

import json
import math
import statistics

from report_text import COLOURS, RESULTS, ROOT, UBATCHES, Json, load, rate, table


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
        "on the GPU and runs q, k and v on parallel streams:\n\n" + table(head, rows) + filled_chip()
    )


def filled_chip() -> str:
    """Steps whose products fill the chip, in turns with the version before."""
    data = load("h200_filled_chip.json")
    steps: dict[str, dict[str, list[float]]] = {}
    for run, counts in data["defaults_in_turns"]["steps"].items():
        for count, samples in counts.items():
            of = steps.setdefault(count, {}).setdefault(run.split()[0], [])
            of += [us for part in samples.values() for us in part]
    rows = []
    for count in sorted(steps, key=int):
        before, now = (
            int(count) / statistics.median(steps[count][of]) * 1e6 for of in ("before", "defaults")
        )
        later = int(count) / statistics.median(data["short_parts"]["steps"][count]["default"]) * 1e6
        rows.append([count, rate(before), rate(now), f"{now / before:.2f}", rate(later)])
    head = ["sequences of llama-8b-Q4_K", "before, tokens/s", "products that fill the chip", "ratio"]
    head.append("also short parts of k, on another H200")
    return (
        "\nSteps that draw their tokens behind 128 positions, by the version before and after in turns "
        f"({data['date']}, `h200_filled_chip.json`):\n\n" + table(head, rows)
    )


def other_engines() -> str:
    """Models that fit one GPU beside others: weight types, mixtures, steps of several sequences."""
    data, later = load("h100_engines.json"), load("h200_engines.json")
    parts = [part for title, models in data["groups"].items() for part in beside_others(title, models)]
    more = [part for title, models in later["groups"].items() for part in beside_others(title, models)]
    versions = " and ".join(f"{name} {version}" for name, version in data["versions"].items())
    commits = " and ".join(f"{commit} ({title})" for title, commit in later["commits"].items())
    return f"""## Other engines on one GPU

{data["device"]}, {data["date"]}, dyno with its defaults (`h100_engines.json`). The other engines are
{versions}. They ran in turn with dyno, with flash attention, a batch of 4096 and a u-batch of 2048.
{data["note"]} The weights are random, in the shapes of the public models. The ratio is to the faster of the
other engines. A dash stands for an engine that does not read the type or was not measured.

{(chr(10) * 2).join(part.strip() for part in parts)}

The same models beside both other engines on one {later["device"]}, {later["date"]}, commits {commits}
(`h200_engines.json`):

{(chr(10) * 2).join(part.strip() for part in more)}"""


def beside_others(title: str, models: Json) -> list[str]:
    """A table of one group of models, and the means of its ratios if it has more than two."""
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
    parts = [table(head, rows)]
    if len(models) > 2:
        means = (
            f"{cell} {math.prod(of) ** (1 / len(of)):.2f} ({min(of):.2f})" for cell, of in ratios.items()
        )
        parts.append(f"Geometric mean of the ratios, and in brackets the smallest: {', '.join(means)}.")
    return parts


def vram_limits() -> str:
    """Mixtures of experts with less memory than they need, beside the best of the other engines."""
    data, later = load("h100_vram_limits.json"), load("h200_vram_limits.json")
    tables = "\n\n".join(
        f"{name}:\n\n{within_limits(limits, ('pp512', 'pp2048', 'tg64')).strip()}"
        for name, limits in later["models"].items()
    )
    return f"""## A model larger than the GPU's memory

{data["device"]}, {data["date"]}, {data["model"]}, {data["threads"]} threads (`h100_vram_limits.json`). dyno
places the weights by itself under `--vram`. The others run with a u-batch of 4096 and the smallest
`--n-cpu-moe` that stays within the limit. Each cell takes the best of llama.cpp and of ik_llama.cpp with and
without `-rtr 1`. With a smaller u-batch the others would have room for more experts: faster tokens, and
slower long prompts. That was not measured.

{within_limits(data["limits"], ("pp512", "pp4096", "tg64")).strip()}

{later["device"]}, {later["date"]}, {later["threads"]} threads (`h200_vram_limits.json`). The others also ran
with a u-batch of 512, and each cell takes the best of all their runs. dyno of deepseek2-lite in 8 and 5 GiB
ran on another machine of the same kind.

{tables}"""


def within_limits(limits: Json, names: tuple[str, ...]) -> str:
    """A table of dyno beside the best of the other engines at each limit, for the cells of these names."""
    rows = []
    for limit, engines in limits.items():
        cells = [f"{limit} GiB" if float(limit) else "all experts in host memory"]
        for cell in names:
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
    for cell in names:
        head += [f"{cell}, dyno", "best other", "ratio"]
    return table(head, rows)
