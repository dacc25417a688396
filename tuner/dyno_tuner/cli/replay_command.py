"""The command `tune replay`."""

from __future__ import annotations

import json
import re
from pathlib import Path  # noqa: TC003  (typer reads annotations when the command runs)
from typing import Annotated

import typer

from ..core.protocol import settings_text
from ..search.proposers import SAMPLERS
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)
from .arguments import check_choice


def replay(
    data: Annotated[
        Path,
        typer.Argument(
            help="Recorded sweep of llama-bench as jsonl, json or csv; can be compressed (.gz, .xz, .bz2)."
        ),
    ],
    sampler: Annotated[str, typer.Option(help=f"Search algorithm: {', '.join(SAMPLERS)}.")] = "guided",
    seeds: Annotated[
        int, typer.Option(help="Number of searches; their seeds count from 0.", min=1, max=100_000)
    ] = 100,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric: pp or tg, with length and depth if there are several, such as tg128@d4096."
        ),
    ] = None,
    evaluations: Annotated[
        int, typer.Option(help="Maximum number of distinct configurations per search.", min=2)
    ] = 12,
    experts: Annotated[
        int | None,
        typer.Option(
            help="Number of experts of the model. Default: the number in the file, or an estimate from its "
            "rates."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model to replay if the file has several: its name or the beginning of its name."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Repeat the search on recorded measurements with many seeds, without hardware."""
    from ..run.replay import replay_many
    from ..targets.replay.target import load_sweep

    check_choice("sampler", sampler, SAMPLERS)
    wanted = re.fullmatch(r"(pp|tg)([0-9]*)(?:@d([0-9]+))?", metric) if metric is not None else None
    if metric is not None and wanted is None:
        raise typer.BadParameter(
            f"--metric {metric!r} is not a metric; give pp, tg, or one such as pp4096 or tg128@d4096"
        )
    result = replay_many(
        load_sweep(data, experts, model),
        metric=wanted[1] if wanted else None,
        tokens=int(wanted[2]) if wanted and wanted[2] else None,
        depth=int(wanted[3]) if wanted and wanted[3] else None,
        sampler=sampler,
        seeds=seeds,
        limit=evaluations,
    )
    if as_json:
        print(json.dumps(result))
        return
    print(
        f"{result['workload']}: {result['points']} recorded points, {result['distinct']} of them run "
        "different code"
    )
    print(f"default  {result['default']['rate']:>10,.1f} t/s  {settings_text(result['default']['settings'])}")
    print(f"best     {result['best']['rate']:>10,.1f} t/s  {settings_text(result['best']['settings'])}")
    for choice in result["choices"]:
        named = settings_text(choice["settings"])
        print(f"chosen   {choice['rate']:>10,.1f} t/s  {named}  in {choice['runs']} runs")
    print(
        f"{100 * result['within_2pct']:.1f} % of {result['runs']} runs ended within 2 % of the best, after "
        f"{result['evaluations_median']:g} configurations (median; the first point within 2 % came after "
        f"{result['evaluations_to_within_2pct_median']:g})"
    )
