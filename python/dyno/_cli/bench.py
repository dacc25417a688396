"""`dyno bench`: speed of prompt processing and generation."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from dyno._cli import groups, options, state


@groups.grouped
def bench(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    n_prompt: Annotated[
        str,
        typer.Option("--n-prompt", "-p", help="Prompt length of the prompt test (pp) in tokens. 0: skip it."),
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("--n-gen", "-n", help="Tokens to generate in the generation test (tg). 0: skip it.")
    ] = "128",
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "-pg",
            metavar="PP,TG",
            help="Add a test that processes a prompt and then generates. Can be repeated.",
        ),
    ] = None,
    depth: Annotated[
        str, typer.Option("--n-depth", "-d", help="Tokens that are in the context before the test.")
    ] = "0",
    batch: Annotated[
        str, typer.Option("--batch-size", "-b", help="Logical batch size: tokens per call of the engine.")
    ] = "2048",
    ubatch: Annotated[
        str | None,
        typer.Option(
            "--ubatch-size",
            "--ubatch",
            "-ub",
            help="Physical batch size: the most tokens that one pass over the layers computes.",
        ),
    ] = None,
    threads: Annotated[
        str | None, typer.Option("--threads", "-t", help="Number of CPU threads for generation (tg).")
    ] = None,
    threads_batch: Annotated[
        str | None,
        typer.Option("--threads-batch", "-tb", help="Number of CPU threads for prompt processing (pp)."),
    ] = None,
    kv_type_k: Annotated[
        str | None,
        typer.Option(
            "--cache-type-k",
            "--kv-type-k",
            "-ctk",
            help="Type of the keys in the KV cache: auto, f32, f16, bf16 or q8_0.",
        ),
    ] = None,
    kv_type_v: Annotated[
        str | None,
        typer.Option(
            "--cache-type-v",
            "--kv-type-v",
            "-ctv",
            help="Type of the values in the KV cache; takes the same types as --cache-type-k.",
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Number of samples per test.")] = 5,
    warm_up: Annotated[
        bool,
        typer.Option("--warmup/--no-warmup", help="Repeat each test untimed until its duration is stable."),
    ] = True,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Output format: md, json, jsonl or csv.")
    ] = "md",
    seed: Annotated[int, typer.Option(help="Random seed of the prompt tokens.")] = 0,
    per_op: Annotated[
        bool,
        typer.Option(
            help="Measure each op separately: time, GB/s, TFLOP/s and percentage of the measured peak. "
            "Needs --output md or json."
        ),
    ] = False,
    *,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Measure tokens per second. Numbers can be lists (512,1024) and ranges (512-2048*2, 0-1024+256)."""
    state.verbosity(verbose)
    model = options.model_argument(model_file, model)
    from dyno import _bench_formats as formats

    if output not in formats.FORMATS:
        raise typer.BadParameter(
            f"{output!r} is not a format; choose from {', '.join(formats.FORMATS)}", param_hint="--output"
        )
    fixed = opening.arguments()
    varied: dict[str, list[Any]] = {}
    for name, text, option in (
        ("ubatch", ubatch, "-ub"),
        ("threads", threads, "-t"),
        ("threads_batch", threads_batch, "-tb"),
    ):
        if text is not None:
            varied[name] = numbers(text, option)
    for name, text in (("kv_type_k", kv_type_k), ("kv_type_v", kv_type_v)):
        if text is not None:
            varied[name] = [t.strip().lower() for t in text.split(",")]
    options.once(varied, fixed)

    from dyno import bench as measure

    grid = measure.cases(
        numbers(n_prompt, "-p"),
        numbers(n_gen, "-n"),
        [_pair(text) for text in pairs or []],
        numbers(depth, "-d"),
        numbers(batch, "-b"),
        # Context and cache types vary slowest, since a change of them costs most.
        {
            k: varied[k]
            for k in ("kv_type_k", "kv_type_v", "ubatch", "threads", "threads_batch")
            if k in varied
        },
    )
    arguments = {"device": opening.device_name, **fixed}
    if per_op:
        if output not in ("md", "json"):
            raise typer.BadParameter(
                f"--per-op can be printed as md or json, but not as {output}", param_hint="--output"
            )
        _per_op(str(model), grid, repetitions, seed, output, arguments)
        return
    _measure(str(model), grid, repetitions, seed, warm_up, output, arguments)


def _per_op(
    path: str, grid: list[Any], repetitions: int, seed: int, output: str, arguments: dict[str, Any]
) -> None:
    from dyno import bench as measure
    from dyno import bench_ops
    from dyno._progress import progress
    from dyno.engine import Engine

    mixed = [case.test for case in grid if case.n_prompt and case.n_gen]
    if mixed:
        raise typer.BadParameter(
            f"--per-op cannot measure the mixed test {mixed[0]}; use -p and -n", param_hint="-pg"
        )
    opened = {"ctx": max(case.positions for case in grid), **arguments}
    found = []
    with Engine(path, **opened) as engine, progress("bench", len(grid)) as advance:
        state.print_choices(engine)
        peaks: dict[int, dict[str, float]] = {}  # by number of CPU threads
        for case in grid:
            changed = dict(case.settings)
            contexts = {k: v for k, v in changed.items() if k.startswith("kv_type")}
            if contexts:
                engine.set_context(**contexts)
            sessions = {k: v for k, v in changed.items() if k not in contexts}
            if sessions:
                engine.set(**sessions)
            on_gpu = engine.device.startswith("cuda")
            threads = 0 if on_gpu else int(engine.settings["threads_batch" if case.n_prompt else "threads"])
            if threads not in peaks:
                peaks[threads] = bench_ops.peaks_of(engine.device, threads)
            result = bench_ops.measure(
                engine,
                case,
                peaks[threads],
                repetitions=repetitions,
                seed=seed,
                notify=lambda note: advance(0, note),
            )
            found.append({**result.to_dict(), "settings": dict(engine.settings)})
            advance(1, "")
            if output == "md":
                print(bench_ops.table(result), end="\n\n")
        machine = measure.machine_facts(engine.device)
    if output == "json":
        print(json.dumps({**machine, **measure.model_facts(path), "tests": found}, indent=2))


def _measure(
    path: str,
    grid: list[Any],
    repetitions: int,
    seed: int,
    warm_up: bool,
    output: str,
    arguments: dict[str, Any],
) -> None:
    from dyno import _bench_formats as formats
    from dyno import bench as measure
    from dyno._progress import progress

    machine, model = measure.machine_facts(arguments["device"]), measure.model_facts(path)
    records = []
    with progress("bench", len(grid)) as advance:
        results = measure.run(
            path,
            grid,
            repetitions=repetitions,
            seed=seed,
            warm_up=warm_up,
            on_step=lambda note: advance(0, note),
            on_open=state.print_choices_once(),
            **arguments,
        )
        for result in results:
            records.append(formats.record(result, machine, model))
            state.print_expert_choices(result.expert_choices, result.case.test)
            advance(1, "")
            if output == "jsonl":  # print each line as soon as it is known
                print(formats.as_jsonl(records[-1:]), flush=True)
    if output == "json":
        print(formats.as_json(records))
    elif output == "csv":
        print(formats.as_csv(records))
    elif output == "md":
        print(formats.as_markdown(records))


_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")
_MAX_NUMBERS = 1000


def numbers(text: str, option: str) -> list[int]:
    """Numbers from a list or range, as in llama-bench: `512`, `1,2,4`, `1-8`, `0-1024+256` or `1-64*2`.

    Raises:
        typer.BadParameter: The text has another form.
    """
    found: list[int] = []
    for part in text.split(","):
        span = _RANGE.fullmatch(part.strip())
        if part.strip().isdecimal():
            found.append(int(part))
        elif span is not None:
            first, last, sign, step = int(span[1]), int(span[2]), span[3] or "+", int(span[4] or 1)
            if last < first or step < 1 or (sign == "*" and (step < 2 or first < 1)):
                raise typer.BadParameter(
                    f"{part!r} is an empty or an infinite range; write FIRST-LAST+STEP", param_hint=option
                )
            while first <= last and len(found) <= _MAX_NUMBERS:
                found.append(first)
                first = first + step if sign == "+" else first * step
        else:
            raise typer.BadParameter(
                f"{part!r} is neither a number nor a range such as 512-2048*2", param_hint=option
            )
        if len(found) > _MAX_NUMBERS:
            raise typer.BadParameter(
                f"{text!r} gives more than {_MAX_NUMBERS} numbers; give fewer", param_hint=option
            )
    return found


def _pair(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(p.strip().isdecimal() for p in parts):
        raise typer.BadParameter(f"{text!r} is not of the form PP,TG, such as 512,128", param_hint="-pg")
    return int(parts[0]), int(parts[1])
