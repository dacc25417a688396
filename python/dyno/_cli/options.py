"""Options that several commands share, and functions that turn them into arguments of `Engine`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dyno._settings_table import KV_TYPES

# Titles of sections of --help.
SPEED = "Context and speed"
DEVICES = "Devices and memory"
PROFILES = "Profile and settings"

Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", help="GGUF file of the model. For a split model, give the first file."),
]
ModelFile = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="GGUF file of the model; the same as --model.")
]
Device = Annotated[
    str,
    typer.Option(help="cpu, cuda:N, or auto (the first usable GPU, or the CPU if there is none)."),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(
        "--override-tensor",
        "-ot",
        metavar="REGEX=DEVICE,...",
        help="Place the tensors whose names match REGEX on a device (CPU, cuda:N or cpu:N). The first "
        "matching rule applies. Can be repeated.",
    ),
]
GpuLayers = Annotated[
    str | None,
    typer.Option(
        "--n-gpu-layers",
        "--gpu-layers",
        "-ngl",
        metavar="N",
        help="Number of layers to place on the device, counted from the end; the output layer counts as one. "
        "The other layers stay on the CPU. all: every layer. Default: as many as fit.",
    ),
]
CpuMoe = Annotated[
    bool | None, typer.Option("--cpu-moe", "-cmoe", help="Keep the expert weights of all layers on the CPU.")
]
NCpuMoe = Annotated[
    int | None,
    typer.Option(
        "--n-cpu-moe", "-ncmoe", help="Keep the expert weights of the first N layers on the CPU.", min=0
    ),
]
VirtualDevices = Annotated[
    list[str] | None,
    typer.Option(
        "--virtual-devices",
        "--virtual-device",
        metavar="N|cpu:N,NAME=VALUE,...",
        help="Add N virtual devices (cpu:1, cpu:2, …), which run on the CPU but have their own memory, to "
        "test a placement without a GPU. Or add one with limits: "
        "cpu:1,link_gbps=8,latency_us=10,memory_mib=4096. Can be repeated.",
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        help="Use at most this much device memory, such as 16GiB. Default: all free device memory.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="Use at most this much main memory, such as 32GiB. Default: all free main memory.",
    ),
]
SplitMode = Annotated[
    str | None,
    typer.Option(
        "--split-mode",
        "-sm",
        metavar="none|layer",
        help="layer: distribute the layers over all GPUs, or over all virtual devices. none: use one device.",
    ),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        "-ts",
        metavar="N,N,...",
        help="Proportion of the layers that each device gets with --split-mode layer, such as 3,1.",
    ),
]
Gpu = Annotated[
    int | None, typer.Option(help="Number of the GPU; the same as --device cuda:N.", min=0, max=9999)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        rich_help_panel=PROFILES,
        help="Use this profile instead of the best match among the installed profiles.",
    ),
]
NoProfile = Annotated[
    bool,
    typer.Option(
        "--no-profile", rich_help_panel=PROFILES, help="Use no profile: run with the default settings."
    ),
]
RequireProfile = Annotated[
    bool,
    typer.Option(
        "--require-profile",
        rich_help_panel=PROFILES,
        help="Fail if no profile matches this model and device exactly.",
    ),
]
ForceProfile = Annotated[
    bool,
    typer.Option(
        "--force-profile",
        rich_help_panel=PROFILES,
        help="Use --profile FILE even if it was measured with another model.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        rich_help_panel=PROFILES,
        help="Set an engine setting by name, such as --set mmap=off. Can be repeated.",
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        "--ctx-size",
        "-c",
        rich_help_panel=SPEED,
        help="Context length in tokens. 0: the length that the model was made for. Default: 4096, or the "
        "limit of the model if that is less.",
    ),
]
Ubatch = Annotated[
    int | None,
    typer.Option(
        "--ubatch",
        "--ubatch-size",
        "-ub",
        help="Physical batch size: the most tokens that one pass over the layers computes. Default: the "
        "value of the profile, or 512 on a CPU, and up to 4096 on a GPU.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        help="Number of CPU threads for generation. Default: the value of the profile, or one per usable "
        "core.",
    ),
]
ThreadsBatch = Annotated[
    int | None,
    typer.Option(
        "--threads-batch",
        "-tb",
        help="Number of CPU threads for prompt processing. Default: the value of the profile, or that of "
        "--threads.",
    ),
]
Numa = Annotated[
    str | None,
    typer.Option(
        "--numa",
        metavar="off|interleave|pin|mirror",
        help="How to distribute CPU threads and weights over NUMA nodes. Default: the value of the profile, "
        "or off.",
    ),
]
KvTypeK = Annotated[
    str | None,
    typer.Option(
        "--kv-type-k",
        "--cache-type-k",
        "-ctk",
        help=f"Type of the keys in the KV cache: {', '.join(KV_TYPES[:-1])} or {KV_TYPES[-1]}. Default: the "
        "value of the profile, or f16, or f32 for latent attention (MLA).",
    ),
]
KvTypeV = Annotated[
    str | None,
    typer.Option(
        "--kv-type-v",
        "--cache-type-v",
        "-ctv",
        help="Type of the values in the KV cache; takes the same types as --kv-type-k.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def model_argument(bare: Path | None, model: Path | None) -> Path:
    """The model, from a bare word or `--model`.

    Raises:
        typer.BadParameter: Neither or both are given.
    """
    if bare is not None and model is not None:
        raise typer.BadParameter(
            f"two models were given, {model} and {str(bare)!r}; give one of them", param_hint="--model"
        )
    given = bare if bare is not None else model
    if given is None:
        raise typer.BadParameter(
            "no model was given; give the GGUF file as --model FILE, or as FILE alone", param_hint="--model"
        )
    return given


def text_of(file: Path) -> str:
    """The text of a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _no_text(str(file), error) from error


def text_of_stdin() -> str:
    """The text of standard input. Without this, Python would pass on wrong bytes in some locales.

    Raises:
        ValueError: It is closed, or not text in the encoding of the locale.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed; give the prompt with -p TEXT or -f FILE")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _no_text("standard input", error) from error


def _no_text(name: str, error: UnicodeDecodeError) -> ValueError:
    return ValueError(
        f"{name} is not {error.encoding.upper()} text: byte {error.start} is "
        f"0x{error.object[error.start]:02x}; give a text file, or convert it with iconv"
    )


def ctx_argument(ctx: int | None, model: Path) -> int | None:
    """The context length in tokens from `--ctx`; 0 means the training context of the model."""
    if ctx != 0:
        return ctx
    from dyno import _core

    return int(_core.describe_model(str(model))["n_ctx_train"])


def device_argument(device: str, gpu: int | None) -> str:
    """`--device` and `--gpu` as one name.

    Raises:
        typer.BadParameter: The two contradict each other.
    """
    if gpu is None:
        return device
    if device not in ("auto", f"cuda:{gpu}"):
        raise typer.BadParameter(
            f"{gpu} contradicts --device {device}; give only one of the two options", param_hint="--gpu"
        )
    return f"cuda:{gpu}"


def once(options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Merge arguments of `Engine` from named options and from `--set`.

    Raises:
        typer.BadParameter: An argument is given by both.
    """
    twice = sorted(set(options) & set(settings))
    if twice:
        raise typer.BadParameter(
            f"{twice[0]} is also given by its own option; give it once", param_hint="--set"
        )
    return {**options, **settings}


_NUMA_OF_LLAMA_CPP = {
    "distribute": "--numa interleave distributes threads and weights over the nodes",
    "isolate": "run dyno under numactl --cpunodebind=N --membind=N to keep the process on one node",
    "numactl": "every value respects the cores and nodes that numactl allows, including off",
}


def numa_argument(value: str | None) -> str | None:
    """The value of `--numa`.

    Raises:
        typer.BadParameter: The value is unknown, or one of llama.cpp; then the message names the equivalent
            in dyno.
    """
    from dyno.settings import SETTINGS

    if value is None:
        return None
    if (answer := _NUMA_OF_LLAMA_CPP.get(value)) is not None:
        raise typer.BadParameter(f"{value} is a value of llama.cpp; in dyno, {answer}", param_hint="--numa")
    if problem := SETTINGS["numa"].problem(value):
        raise typer.BadParameter(problem, param_hint="--numa")
    return value


def profile_argument(
    profile: Path | None, no_profile: bool, require: bool, force: bool = False
) -> dict[str, Any]:
    """The profile options as arguments of `Engine`.

    Raises:
        typer.BadParameter: Two options contradict each other.
    """
    if no_profile and (profile is not None or require):
        raise typer.BadParameter(
            "contradicts --profile and --require-profile; leave one out", param_hint="--no-profile"
        )
    if force and profile is None:
        raise typer.BadParameter("works only with --profile FILE", param_hint="--force-profile")
    if no_profile:
        return {"profile": None}
    return {
        "profile": "auto" if profile is None else profile,
        "require_profile": require,
        "force_profile": force,
    }


def settings(given: list[str] | None, **named: Any) -> dict[str, Any]:
    """Settings from `--set NAME=VALUE` and from named options, without options that were not given.

    Raises:
        typer.BadParameter: A word is not NAME=VALUE, a name is unknown, a value is impossible, or a setting
            is given twice.
    """
    from dyno.settings import SETTINGS, unknown_setting

    result = {name: value for name, value in named.items() if value is not None}
    for text in given or []:
        name, equals, value = text.partition("=")
        setting = SETTINGS.get(name)
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE", param_hint="--set")
        if setting is None:
            raise typer.BadParameter(unknown_setting(name), param_hint="--set")
        if name in result:
            raise typer.BadParameter(f"{name} is given more than once; give it once", param_hint="--set")
        try:
            result[name] = setting.parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--set") from error
    return result
