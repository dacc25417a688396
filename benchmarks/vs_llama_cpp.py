"""Runs dyno, llama.cpp and ik_llama.cpp in turn on the same files and threads; compares medians.

    pip install llama-cpp-python     # here, or in an environment of its own: --llama-python …/bin/python
    python benchmarks/vs_llama_cpp.py model.gguf … -p 512 -n 64 -t 2 --rounds 3 --json results.json
    python benchmarks/vs_llama_cpp.py model.gguf … --llama-bin …/llama-bench --ik-bin …/llama-bench
    python benchmarks/vs_llama_cpp.py model.gguf … --no-llama --ik-bin …/llama-bench
    python benchmarks/vs_llama_cpp.py model.gguf … -p 4096 --kv q8_0    # tokens at a depth of 4096
    python benchmarks/vs_llama_cpp.py model.gguf … --busy 1    # beside one thread of another program

Each measurement is a new process: load, warm-up, then samples. Each round begins with another engine, so that
a drift of the machine affects all of them. The result is the ratio of medians over all samples; the spread
between rounds is printed beside it. pp decodes a prompt of random tokens and computes the logits of the last
one. tg then decodes random tokens one by one, without sampling. The llama-bench of an engine does the same.
Its flags beside the common ones are `--llama-args` and `--ik-args`. If `--ik-args` is given several times,
each is measured, and the fastest counts. The first sample of each test warms up and does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator


class Runner(Protocol):
    """An engine with an open model."""

    def decode(self, tokens: np.ndarray) -> None:
        """Append tokens; the last one's logits are computed."""

    def clear(self) -> None:
        """Empty the context."""


class Dyno:
    """This project's engine with its defaults."""

    def __init__(self, model: str, ubatch: int, threads: int, ctx: int, kv: str) -> None:
        import dyno

        self._engine = dyno.Engine(
            model,
            device="cpu",
            profile=None,
            threads=threads,
            threads_batch=threads,
            ubatch=ubatch,
            ctx=ctx,
            kv_type_k=kv,
            kv_type_v=kv,
        )
        self.version = f"dyno {dyno.__version__}"

    def decode(self, tokens: np.ndarray) -> None:
        self._engine.logits(tokens, reset=False, rows="last")

    def clear(self) -> None:
        self._engine.reset()


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python; flash attention on."""

    def __init__(self, model: str, ubatch: int, threads: int, ctx: int, kv: str) -> None:
        import llama_cpp as lc

        self._lc = lc
        self._quiet = lc.llama_log_callback(lambda *_: None)  # kept alive: C holds the pointer
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self._model = lc.llama_model_load_from_file(model.encode(), lc.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        params = lc.llama_context_default_params()
        params.n_ctx = ctx
        params.n_batch = max(ubatch, 512)
        params.n_ubatch = ubatch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.type_k = params.type_v = {"f16": lc.GGML_TYPE_F16, "q8_0": lc.GGML_TYPE_Q8_0}[kv]
        self._context = lc.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp cannot make a context")
        self._memory = lc.llama_get_memory(self._context)
        self.version = f"llama-cpp-python {lc.__version__}: {lc.llama_print_system_info().decode().strip()}"

    def decode(self, tokens: np.ndarray) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens.tolist())
        batch = self._lc.llama_batch_get_one(array, len(tokens))
        status = self._lc.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        self._lc.llama_synchronize(self._context)

    def clear(self) -> None:
        self._lc.llama_memory_clear(self._memory, True)


RUNNERS = {"dyno": Dyno, "llama.cpp": LlamaCpp}
IK = "ik_llama.cpp"
IK_ARGS = "-rtr 1 -fa 0"
"""Repacked rows without flash attention, the faster setting of ik_llama.cpp on CPUs for short texts."""


def others(args: argparse.Namespace) -> list[str]:
    """The names of the other engines; ik_llama.cpp has one for each set of flags."""
    found = [] if args.no_llama else ["llama.cpp"]
    if args.ik_bin:
        found += [f"{IK} {flags}" for flags in args.ik_args] if len(args.ik_args) > 1 else [IK]
    return found


def bench_rows(binary: Path, model: str, args: argparse.Namespace, flags: list[str]) -> list[dict[str, Any]]:
    """Runs a llama-bench once and returns its rows."""
    command = [str(binary), "-m", model, "-o", "json", "-r", str(args.samples + 1), "-t", str(args.threads)]
    command += ["-ub", str(args.ubatch), "-b", str(max(512, args.ubatch)), "-ngl", "0"]
    command += ["-ctk", args.kv, "-ctv", args.kv, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.strip() == "["), None)
    if done.returncode != 0 or begin is None:
        raise SystemExit(f"{shlex.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return list(json.loads("\n".join(lines[begin:])))


def measure_binary(args: argparse.Namespace, engine: str, model: str) -> dict[str, Any]:
    """Samples of the llama-bench of another engine, in tokens a second."""
    prompt, generate = str(args.prompt), str(args.generate)
    if engine == "llama.cpp":
        flags = shlex.split(args.llama_args)
        rows = bench_rows(args.llama_bin, model, args, ["-p", prompt, "-n", "0", *flags])
        rows += bench_rows(args.llama_bin, model, args, ["-p", "0", "-n", generate, "-d", prompt, *flags])
    else:
        flags = shlex.split(engine.removeprefix(IK)) or shlex.split(args.ik_args[0])
        behind = ["-p", prompt, "-n", "0", "-gp", f"{prompt},{generate}"]  # times only the generation
        rows = bench_rows(args.ik_bin, model, args, [*behind, *flags])
    result: dict[str, Any] = {"pp": [], "tg": []}
    for row in rows:
        result["version"] = f"{engine} {row['build_number']} ({row['build_commit']}) {shlex.join(flags)}"
        result["tg" if row["n_gen"] else "pp"] = row["samples_ts"][1:]
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Samples of one process, in tokens a second."""
    ctx = args.prompt + args.generate + 64
    runner = RUNNERS[args.engine](args.models[0], args.ubatch, args.threads, ctx, args.kv)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, args.vocab, args.prompt + args.generate, dtype=np.int32)
    result: dict[str, Any] = {"version": runner.version, "pp": [], "tg": []}
    for sample in range(args.samples + 1):  # the first one warms up
        runner.clear()
        start = time.perf_counter()
        if args.prompt:
            runner.decode(tokens[: args.prompt])
        middle = time.perf_counter()
        for token in tokens[args.prompt :]:
            runner.decode(token.reshape(1))
        end = time.perf_counter()
        if sample:
            result["pp"].append(args.prompt / (middle - start))
            result["tg"].append(args.generate / (end - middle))
    return result


def child(args: argparse.Namespace, engine: str, model: str, vocab: int) -> dict[str, Any]:
    """One measurement in a new process."""
    if engine.startswith(IK) or (engine == "llama.cpp" and args.llama_bin):
        return measure_binary(args, engine, model)
    python = args.llama_python if engine == "llama.cpp" and args.llama_python else sys.executable
    command = [python, "-P", __file__, model, "--engine", engine, "--vocab", str(vocab)]
    command += ["-p", str(args.prompt), "-n", str(args.generate), "-t", str(args.threads)]
    command += ["-ub", str(args.ubatch), "--samples", str(args.samples), "--kv", args.kv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{engine} failed on {model} ({done.returncode}):\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """A context manager that runs `count` processes with one busy thread each, on cores of the system's
    choice."""
    words = [sys.executable, "-P", "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            child = stack.enter_context(subprocess.Popen(words))
            stack.callback(child.kill)
        yield


def compare(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """All rounds of one model."""
    from dyno import _core

    vocab = int(_core.describe_model(model)["n_vocab"])
    engines = ["dyno", *others(args)]
    samples: dict[str, dict[str, list[list[float]]]] = {e: {"pp": [], "tg": []} for e in engines}
    versions: dict[str, str] = {}
    for number in range(args.rounds):
        first = number % len(engines)
        for engine in engines[first:] + engines[:first]:
            with competitors(args.busy):
                result = child(args, engine, model, vocab)
            versions[engine] = result["version"]
            for test in ("pp", "tg"):
                samples[engine][test].append(result[test])
    row: dict[str, Any] = {"model": Path(model).name, "versions": versions, "samples": samples}
    for test, size in (("pp", args.prompt), ("tg", args.generate)):
        if size:
            row[f"{test}{size}"] = summary(samples, test)
            print(f"{row['model']:28} {test}{size:<5} {describe(row[f'{test}{size}'])}", flush=True)
    return row


def summary(samples: dict[str, dict[str, list[list[float]]]], test: str) -> dict[str, Any]:
    """Medians by engine, and dyno's over the fastest other engine's, over all rounds and round by round."""
    medians = {e: statistics.median(x for run in s[test] for x in run) for e, s in samples.items()}
    fastest = max((e for e in medians if e != "dyno"), key=lambda e: medians[e])
    rounds = [
        statistics.median(a) / statistics.median(b)
        for a, b in zip(samples["dyno"][test], samples[fastest][test], strict=True)
    ]
    return {
        **medians,
        "fastest_other": fastest,
        "ratio": medians["dyno"] / medians[fastest],
        "ratio_of_rounds": rounds,
    }


def describe(result: dict[str, Any]) -> str:
    rates = "  ".join(
        f"{e} {rate:9.1f}" for e, rate in result.items() if isinstance(rate, float) and e != "ratio"
    )
    rounds = result["ratio_of_rounds"]
    return f"{rates}  ratio {result['ratio']:.2f} (rounds {min(rounds):.2f} to {max(rounds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--generate", type=int, default=64)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-ub", "--ubatch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each engine")
    parser.add_argument("--samples", type=int, default=3, help="samples of each process, after one warm-up")
    parser.add_argument("--llama-python", help="an interpreter (3.11 or newer) that has llama-cpp-python")
    parser.add_argument(
        "--llama-bin", type=Path, help="llama-bench of llama.cpp, instead of llama-cpp-python"
    )
    parser.add_argument("--llama-args", default="-fa 1", help="further flags for it, as one word")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--ik-bin", type=Path, help="llama-bench of ik_llama.cpp, to be measured as well")
    parser.add_argument(
        "--ik-args", action="append", help=f"further flags for it, as one word; default: {IK_ARGS!r}"
    )
    parser.add_argument("--kv", choices=("f16", "q8_0"), default="f16", help="type of the cache")
    parser.add_argument("--busy", type=int, default=0, help="busy threads of other programs meanwhile")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--engine", choices=RUNNERS, help=argparse.SUPPRESS)
    parser.add_argument("--vocab", type=int, default=8192, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args)))
        return
    args.ik_args = args.ik_args or [IK_ARGS]
    if not others(args):
        parser.error("--no-llama leaves no other engine; --ik-bin names one")
    from dyno import _core

    rows = [compare(args, model) for model in args.models]
    ratios = [r[k]["ratio"] for r in rows for k in r if k.startswith(("pp", "tg"))]
    mean = float(np.exp(np.mean(np.log(ratios))))
    print(f"to the fastest other: geometric mean of {len(ratios)} {mean:.3f}, smallest {min(ratios):.3f}")
    if args.json:
        cpu = _core.cpu_info()
        command = "python benchmarks/vs_llama_cpp.py " + " ".join(
            os.path.basename(a) if a.endswith(".gguf") or os.sep in a else a for a in sys.argv[1:]
        )
        report = {
            "command": command,
            "machine": {
                "cpu": cpu["name"],
                "isa": cpu["isa"],
                "cores": cpu["cores"],
                "os": platform.platform(),
            },
            "threads": args.threads,
            "cache": args.kv,
            "busy": args.busy,
            "geometric_mean": mean,
            "smallest": min(ratios),
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
