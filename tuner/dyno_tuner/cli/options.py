"""The options of `tune` and its subcommands, as annotations for typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..search.proposers import SAMPLERS

# Titles of sections of --help.
GOAL = "Objective"
LARGE = "Models larger than the device"
OTHERS = "llama.cpp and ik_llama.cpp"
MACHINES = "Several GPUs and machines"
SEARCH = "Search"

# ---- of both

Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda:N, cpu:N (a virtual device), or auto (the first usable GPU, or the CPU if "
        "there is none)."
    ),
]
_WORKLOADS = (
    "chat, rag, serve, or lengths with optional weights, such as pp=512,4096:2,tg=128,depth=0,8192 (pp: "
    "prompt, tg: generation). Default: pp=4096,tg=128 on a GPU and pp=512,tg=64 on a CPU."
)
WhatWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help=f"Workload to optimise: {_WORKLOADS} On a CPU with a --budget below 5m and a file of at least "
        "256 MiB: pp=128,tg=16.",
    ),
]
MeasuredWorkload = Annotated[
    str | None, typer.Option("--workload", help=f"Workload to measure: {_WORKLOADS}")
]
Held = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Fix an engine setting, so that it is not searched. Can be repeated.",
    ),
]
HeldInAll = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Give an engine setting this value in every measurement. Can be repeated.",
    ),
]
Binaries = Annotated[
    Path | None,
    typer.Option("--bin", metavar="DIR", help="Folder with the binaries of llama.cpp or ik_llama.cpp."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]

# ---- of tune

Model = Annotated[str | None, typer.Option("--model", "-m", help="GGUF file; the same as MODEL.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="Number of the GPU; the same as --device cuda:N. Give several GPUs of one kind as 0,1,2."
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Profile file to write. Default: a file in your profile folder.")
]
Budget = Annotated[str, typer.Option(help="Time limit of the tune, such as 90s, 3m or 1h.")]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.", min=0)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the last run from its journal.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Measure even while other programs use the CPUs. The numbers are then less reliable, and the "
        "profile is marked as disturbed.",
    ),
]
AllowApprox = Annotated[
    float | None,
    typer.Option(
        help="Also search settings that change the answers, up to this mean KLD in nats per token, such as "
        "0.01. Default: only settings that keep the answers.",
        min=0,
    ),
]
Sampler = Annotated[
    str, typer.Option(rich_help_panel=SEARCH, help=f"Search algorithm: {', '.join(SAMPLERS)}.")
]
Storage = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MACHINES,
        help="URL of an Optuna storage, such as sqlite:///tune.db or postgresql://user@host/db. Equal "
        "machines that give the same storage search together.",
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option(
        "--study",
        rich_help_panel=MACHINES,
        help="Name of the Optuna study in --storage. Default: derived from the model and the workload.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        rich_help_panel=MACHINES,
        help="Run the workers on a Ray cluster: local, auto, HOST:PORT or ray://HOST:PORT. Needs "
        "gguf-dyno[ray].",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=MACHINES,
        help="Number of workers with --ray. Default: one per GPU, or one per node if there are no GPUs.",
        min=1,
        max=999,
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        help="Context length in tokens. Default: 4096, or more if the workload needs it, up to the limit "
        "of the model.",
        min=1,
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LARGE,
        help="Use at most this much device memory, such as 16GiB. With --device cpu: main memory.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LARGE, help="Use at most this much main memory beside a device, such as 32GiB."
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=LARGE,
        help="Search on the first N layers only, which is faster, and then prove the result on the whole "
        "model. Kernels keep their defaults.",
        min=1,
    ),
]
VirtualDevices = Annotated[
    list[str] | None,
    typer.Option(
        "--virtual-device",
        metavar="cpu:N,NAME=VALUE,...",
        rich_help_panel=LARGE,
        help="Add a virtual device, which runs on the CPU but has its own memory and link, to tune without a "
        "GPU: cpu:1,link_gbps=8,latency_us=10,memory_mib=4096,streams=1. Can be repeated.",
    ),
]
Pareto = Annotated[
    bool,
    typer.Option(
        "--pareto",
        rich_help_panel=GOAL,
        help="Also write profiles that need less memory, and a page that compares them.",
    ),
]
PowerLimits = Annotated[
    str | None,
    typer.Option(
        "--power-limits",
        metavar="W,W,...",
        rich_help_panel=GOAL,
        help="Tune at each of these GPU power limits in watts and compare the results. The original limit is "
        "restored at the end. Needs root.",
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        rich_help_panel=GOAL,
        help="speed; energy: tokens per joule, by the energy counters of GPU and CPU; or memory: the least "
        "planned memory that does not cost speed.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        rich_help_panel=OTHERS,
        help="Engine to tune: dyno, llama.cpp or ik_llama.cpp. Your own command line for llama.cpp or "
        "ik_llama.cpp may follow after --.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Text file whose passages serve as prompts. It matters for mixtures of experts, where the text "
        "determines which experts are used. With --bin: the text on which answers are compared."
    ),
]
Kernels = Annotated[bool, typer.Option(rich_help_panel=SEARCH, help="Also choose the kernel of each op.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print tracebacks of errors.")]

# ---- of tune ab

ForceBeside = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Measure even while other programs use the CPUs. The result is then marked as disturbed, and "
        "its verdicts are not proven.",
    ),
]
SideA = Annotated[
    str,
    typer.Argument(
        metavar="A", help="First side: a profile, a folder with llama-bench, a build, a commit, or `default`."
    ),
]
SideB = Annotated[
    str,
    typer.Argument(
        metavar="B", help="Second side, which is compared with A; takes the same kinds of values."
    ),
]
Flags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- FLAGS]", help="llama-server flags for the binaries of both sides."),
]
OneGpu = Annotated[
    int | None,
    typer.Option("--gpu", help="Number of the GPU; the same as --device cuda:N.", min=0, max=999),
]
Rounds = Annotated[int, typer.Option(help="Number of ABBA rounds, of four processes each.", min=2, max=1000)]
RoundsBudget = Annotated[
    str | None,
    typer.Option("--budget", help="Time limit, such as 90s, 3m or 1h. No round starts that would exceed it."),
]
Least = Annotated[float, typer.Option(help="Smallest difference that counts; 0.01 is 1 %.", min=0.0, max=1.0)]
FlagsA = Annotated[str, typer.Option(help="Additional flags for the binaries of A, as one quoted argument.")]
FlagsB = Annotated[str, typer.Option(help="Additional flags for the binaries of B, as one quoted argument.")]
ProfileA = Annotated[Path | None, typer.Option(help="Profile to use if A is a build or a commit.")]
ProfileB = Annotated[Path | None, typer.Option(help="Profile to use if B is a build or a commit.")]
ForceProfile = Annotated[
    bool,
    typer.Option(
        "--force-profile", help="Use profiles of dyno even if they were measured with another model."
    ),
]
Repository = Annotated[
    Path | None,
    typer.Option("--repo", metavar="DIR", help="Git repository of the commits. Default: the current folder."),
]
Defines = Annotated[
    list[str] | None,
    typer.Option(
        "--define",
        "-D",
        metavar="NAME=VALUE",
        help="CMake definition for building commits, such as GGML_CUDA=ON. Can be repeated.",
    ),
]
AnswersText = Annotated[
    Path | None, typer.Option("--text", help="Text file on which llama-perplexity compares the answers.")
]
Check = Annotated[bool, typer.Option("--answers/--no-answers", help="Also compare the answers.")]
Allow = Annotated[
    float,
    typer.Option(
        "--allow-approx", help="Largest mean KLD in nats per token that the answers of B may have.", min=0.0
    ),
]
Deadline = Annotated[float, typer.Option(help="Time limit of one process in seconds.", min=1.0)]
Log = Annotated[
    Path | None, typer.Option(help="File for the standard error of llama.cpp and ik_llama.cpp binaries.")
]
TableOut = Annotated[Path | None, typer.Option("--out", help="Also write the table to this file.")]
