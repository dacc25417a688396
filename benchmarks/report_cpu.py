"""The sections of the report on CPUs."""

from __future__ import annotations

from typing import Any

from report_text import COLOURS, load, rate, table


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


def engine_cells(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table with both other engines, ik_llama.cpp with its faster flags."""
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
    return head, rows


def cpu_types() -> str:
    data = load("cpu_both_engines.json")
    head, rows = engine_cells(data)
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


def cpu_avx2() -> str:
    """Both other engines on a CPU without AVX-512."""
    data = load("cpu_avx2_engines.json")
    head, rows = engine_cells(data)
    return f"""## Without AVX-512

{data["machine"]["cpu"]}, {data["machine"]["isa"]}, {data["threads"]} threads on
{data["machine"]["cores"]} cores, {data["date"]} (`cpu_avx2_engines.json`). The host is shared with other
machines, so two processes of one engine differ by up to 15 %. The other engines are
{data["engines"]["llama.cpp"]} and ik_llama.cpp {data["engines"]["ik_llama.cpp"]}, built there for its
processor. The qwen3moe models have six layers. ik_llama.cpp ran with repacked rows and with flash attention;
the faster counts. The engines ran in turn. A cell is the median of two processes, and the ratio is to the
faster of the others. The cells of qwen3moe are medians of five processes of dyno and of ik_llama.cpp with
repacked rows: two had not been enough. The geometric mean of the ratios of tokens is
{data["geometric_mean_tokens"]:.2f}, and the smallest is {data["smallest_tokens"]:.2f}. Of prompts they are
{data["geometric_mean_prompts"]:.2f} and {data["smallest_prompts"]:.2f}.

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
