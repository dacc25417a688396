"""The options of `tune` and its subcommands, as types that typer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..search.proposers import SAMPLERS

# Titles of sections of --help.
GOAL = "The goal, if it is not speed"
LARGE = "Models larger than the device"
OTHERS = "llama.cpp and ik_llama.cpp"
MACHINES = "Several GPUs and machines"
SEARCH = "The search"

# ---- of both

Device = Annotated[
    str,
    typer.Option(help="cpu, cuda:N, cpu:N (a virtual device), or auto: the first usable GPU, else the CPU."),
]
WhatWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="The work to be fast at: chat, rag, serve, or tokens[:weight] as in "
        "pp=512,4096:2,tg=128,depth=0,8192. Default: pp=4096,tg=128 on a GPU, pp=512,tg=64 on a CPU; "
        "a CPU with less than 5m takes pp=128,tg=16 for files of 256 MiB or more.",
    ),
]
Held = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Fix a setting, so that it is not searched; may be given several times.",
    ),
]
Binaries = Annotated[
    Path | None, typer.Option("--bin", help="Folder with the binaries of llama.cpp or ik_llama.cpp.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

# ---- of tune

Model = Annotated[str | None, typer.Option("--model", "-m", help="GGUF file.")]
Gpu = Annotated[
    str | None,
    typer.Option(help="Number of the GPU; the same as --device cuda:N. Several of one kind: 0,1,2."),
]
Out = Annotated[
    Path | None, typer.Option(help="Profile to write. Default: a file in the user's profile folder.")
]
Budget = Annotated[str, typer.Option(help="Time that the tune may take, such as 90s, 3m or 1h.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.", min=0)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the journal of the last run.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Measure while other programs use the CPUs, and mark the profile as disturbed (its numbers are "
        "less sure).",
    ),
]
AllowApprox = Annotated[
    float | None,
    typer.Option(
        help="Also search settings that change answers, up to this mean KLD (nats per token), such as 0.01. "
        "At 0 answers stay the same.",
        min=0,
    ),
]
Sampler = Annotated[
    str, typer.Option(rich_help_panel=SEARCH, help=f"Sampler of the search: {', '.join(SAMPLERS)}.")
]
Storage = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MACHINES,
        help="URL of an Optuna storage, such as sqlite:///tune.db or postgresql://user@host/db. Machines of "
        "one kind that name the same storage search together.",
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option(
        "--study",
        rich_help_panel=MACHINES,
        help="Name of the study in --storage. Default: the model and the workload.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        rich_help_panel=MACHINES,
        help="Let Ray place the workers: local, auto, HOST:PORT or ray://HOST:PORT; needs gguf-dyno[ray].",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=MACHINES,
        help="Number of workers with --ray. Default: one for each GPU, or one for each node without GPUs.",
        min=1,
        max=999,
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        help="Length of the context. Default: 4096 or the need of the workload, at most the model's limit.",
        min=1,
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LARGE,
        help="Use this much memory of the device, such as 16GiB; with --device cpu, of the main memory.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(rich_help_panel=LARGE, help="Use this much main memory beside a device, such as 32GiB."),
]
Layers = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=LARGE,
        help="Search on this many first layers, which is faster, then prove the result on the whole model. "
        "Kernels stay at their defaults.",
        min=1,
    ),
]
VirtualDevices = Annotated[
    list[str] | None,
    typer.Option(
        "--virtual-device",
        metavar="cpu:N,NAME=VALUE,...",
        rich_help_panel=LARGE,
        help="Add a virtual device behind a link, to tune for it without a GPU: "
        "cpu:1,link_gbps=8,latency_us=10,memory_mib=4096,streams=1. May be given several times.",
    ),
]
Pareto = Annotated[
    bool,
    typer.Option(
        "--pareto", rich_help_panel=GOAL, help="Also write profiles that need less memory, and a plot."
    ),
]
PowerLimits = Annotated[
    str | None,
    typer.Option(
        "--power-limits",
        metavar="W,W,...",
        rich_help_panel=GOAL,
        help="Set the GPU's power limit to each of these, tune there, compare them, and set it back; takes "
        "root.",
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        rich_help_panel=GOAL,
        help="speed; energy: tokens per joule, by the counters of GPU and CPU; memory: the least planned "
        "memory that costs no speed.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        rich_help_panel=OTHERS,
        help="Engine: dyno, llama.cpp or ik_llama.cpp. Your own command line for it may follow after --.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Your own text: prompts are passages of it. It matters for mixtures of experts, where the text "
        "decides which experts work. With --bin: the text on which answers are compared."
    ),
]
Kernels = Annotated[bool, typer.Option(rich_help_panel=SEARCH, help="Also choose kernels of single ops.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show traces of errors.")]

# ---- of tune ab

SideA = Annotated[
    str, typer.Argument(metavar="A", help="Profile, folder with llama-bench, build, commit, or `default`.")
]
SideB = Annotated[
    str, typer.Argument(metavar="B", help="The other side, of the same kinds; it is compared with A.")
]
Flags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- FLAGS]", help="Flags of llama-server for the binaries of both sides."),
]
OneGpu = Annotated[
    int | None,
    typer.Option("--gpu", help="Number of the GPU; the same as --device cuda:N.", min=0, max=999),
]
Rounds = Annotated[int, typer.Option(help="ABBA rounds of four processes each.", min=2, max=1000)]
RoundsBudget = Annotated[
    str | None,
    typer.Option("--budget", help="Time limit, such as 90s, 3m or 1h. No round begins that would end later."),
]
Least = Annotated[float, typer.Option(help="Smallest difference that counts; 0.01 is 1 %.", min=0.0, max=1.0)]
FlagsA = Annotated[str, typer.Option(help="Further flags of A's binaries, as one word.")]
FlagsB = Annotated[str, typer.Option(help="Further flags of B's binaries, as one word.")]
ProfileA = Annotated[Path | None, typer.Option(help="Profile for a build or commit A.")]
ProfileB = Annotated[Path | None, typer.Option(help="Profile for a build or commit B.")]
ForceProfile = Annotated[
    bool, typer.Option("--force-profile", help="Use profiles of dyno although they belong to another model.")
]
Repository = Annotated[
    Path | None, typer.Option("--repo", help="Repository of the commits. Default: the current folder.")
]
Defines = Annotated[
    list[str] | None,
    typer.Option(
        "--define", "-D", metavar="NAME=VALUE", help="CMake definition for commits, such as GGML_CUDA=ON."
    ),
]
AnswersText = Annotated[
    Path | None, typer.Option("--text", help="Text on which llama-perplexity compares the answers.")
]
Check = Annotated[bool, typer.Option("--answers/--no-answers", help="Compare the answers too.")]
Allow = Annotated[
    float,
    typer.Option("--allow-approx", help="Mean KLD (nats per token) that B's answers may have.", min=0.0),
]
Deadline = Annotated[float, typer.Option(help="Time limit of one process, in seconds.", min=1.0)]
Log = Annotated[Path | None, typer.Option(help="File for the standard error of other engines' binaries.")]
TableOut = Annotated[Path | None, typer.Option("--out", help="Write the table to this file too.")]
