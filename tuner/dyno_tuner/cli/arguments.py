"""Parsing of option values, shared by `tune` and its subcommands. Functions raise typer.BadParameter for an
invalid value."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from dyno._memory_size import parse_limit

from ..core.errors import TargetUnusable, TuneError
from ..core.protocol import Workload
from ..core.redaction import redact_words
from ..targets import declared

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ..targets.declaration import Declaration

T = TypeVar("T")


def usage(parse: Callable[..., T], *words: Any) -> T:
    """Parse a word of the command line. A word that `parse` cannot read is wrong usage."""
    try:
        return parse(*words)
    except TuneError as error:
        raise typer.BadParameter(str(error)) from error


def check_choice(what: str, word: str, choices: Collection[str]) -> None:
    """Raises typer.BadParameter for a word that is not among the choices."""
    if word not in choices:
        raise typer.BadParameter(f"{what} {word!r} does not exist; choose from {', '.join(choices)}")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90`, `90s`, `3m` or `1.5h` (the value of --budget)."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(s|sec|m|min|h)?\s*", text)
    if not found:
        raise typer.BadParameter(
            f"{text!r} is not a duration; write, for example, 90s, 3m or 1.5h", param_hint="--budget"
        )
    seconds = float(found[1]) * {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"]
    if not 5 <= seconds <= 7 * 86400:
        unit = "" if found[2] else " (no unit: seconds)"
        raise typer.BadParameter(
            f"{text!r} is {seconds:g} s{unit}; expected 5 s to 168 h, such as 90s or 3m",
            param_hint="--budget",
        )
    return seconds


def memory_limit(option: str, text: str | None) -> int | None:
    """Bytes of the value of `--vram` or `--ram`."""
    try:
        return None if text is None else parse_limit(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def gpu_numbers(text: str) -> list[int]:
    """The GPU numbers of a text such as `0` or `0,1,3`, without repetition."""
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text):
        raise typer.BadParameter(
            f"--gpu {text!r} is not a list of GPU numbers; write, for example, --gpu 0 or --gpu 0,1"
        )
    numbers = [int(n) for n in text.split(",")]
    twice = [n for n in numbers if numbers.count(n) > 1]
    if twice:
        raise typer.BadParameter(f"--gpu {text!r} has GPU {twice[0]} more than once; give each GPU once")
    return numbers


def device_names(device: str, gpu: str | None) -> list[str]:
    """The device names of `--device` and `--gpu`: `auto`, `cpu`, `cpu:N` or `cuda:N`."""
    if gpu is not None:
        names = [f"cuda:{n}" for n in gpu_numbers(gpu)]
        if device != "auto" and [device] != names:
            raise typer.BadParameter(f"--gpu {gpu} contradicts --device {device}; give only one of the two")
        return names
    if not re.fullmatch(r"auto|cpu(:[1-9][0-9]?)?|cuda:[0-9]{1,3}", device):
        raise typer.BadParameter(f"--device {device!r} is not a device; give cpu, cpu:N, cuda:N or auto")
    return [device]


def placement_of(
    virtual_devices: list[str], vram: int | None, ram: int | None, device: str
) -> dict[str, Any]:
    """Virtual devices and memory limits in the form that the target of dyno takes.

    Raises:
        typer.BadParameter: A virtual device cannot be read, or `--ram` is given with only the CPU.
    """
    from dyno._virtual_devices import parse_virtual_devices

    found: dict[str, Any] = {}
    if virtual_devices:
        try:
            found["virtual_devices"] = parse_virtual_devices(virtual_devices)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--virtual-device") from error
    if ram is not None and device == "cpu":
        raise typer.BadParameter(
            "to limit main memory with --device cpu, give --vram instead", param_hint="--ram"
        )
    if ram is not None:
        found["ram"] = ram
    if vram is not None and device != "cpu":
        found["vram"] = vram
    return found


def devices_of(device: str, gpu: str | None, virtual_devices: Any = 0) -> list[str]:
    """The existing devices that the options name. A line on standard error names the device that `auto`
    chose.

    Raises:
        DeviceError: The device does not exist, or this build has no code for it.
    """
    from dyno._virtual_devices import read_virtual_devices
    from dyno.devices import built_for_cuda, resolve_device

    found = []
    for name in device_names(device, gpu):
        chosen = resolve_device(name, read_virtual_devices(virtual_devices))
        if name == "auto" and built_for_cuda():
            print(chosen.headline, file=sys.stderr)
        found.append(chosen.name)
    return found


def check_energy(devices: Sequence[str]) -> None:
    """Check, before a model is opened, that the energy of these devices can be read.

    Raises:
        TargetUnusable: A counter is missing.
    """
    from dyno import _energy
    from dyno.devices import resolve_device

    for name in devices:
        on_gpu = name.startswith("cuda:")
        bus = str(resolve_device(name).info["pci_bus_id"]) if on_gpu else None
        if why := _energy.Counters(bus).unreadable("gpu" if on_gpu else "cpu"):
            raise TargetUnusable(f"--objective energy: {why}")


def gpu_number(device: str, gpu: int | None, *, foreign: bool) -> int | None:
    """The number of the GPU for all sides; None for the CPU. `auto` is the first usable GPU, as in `tune`. If
    all sides are binaries of other engines, it is the CPU."""
    (name,) = device_names(device, None if gpu is None else str(gpu))
    if name == "auto":
        name = "cpu" if foreign else devices_of("auto", None)[0]
    return int(name.removeprefix("cuda:")) if name.startswith("cuda:") else None


SHORT_BUDGET = 300.0  # seconds; below it, a CPU measures shorter runs of a large file
LARGE_FILE = 256 << 20  # bytes


def usual_workload(device: str, budget: float | None = None, model: str | None = None) -> Workload:
    """The default workload. A CPU reads all weights of a dense model for each token, and two cores need
    seconds for a prompt of 512 tokens. With a large file, a short budget would have room for too few such
    measurements.

    Args:
        budget: Seconds; None: no limit.
        model: The file. A folder or several files count as small.
    """
    if device.startswith("cuda"):
        return Workload(pp=4096, tg=128)
    large = model is not None and os.path.isfile(model) and os.path.getsize(model) >= LARGE_FILE
    short = large and budget is not None and budget < SHORT_BUDGET
    return Workload(pp=128, tg=16) if short else Workload(pp=512, tg=64)


def workload_of(
    text: str | None, device: str, budget: float | None = None, model: str | None = None
) -> Workload:
    """The workload of `--workload`, or the default one. The other arguments are as in `usual_workload`."""
    usual = usual_workload(device, budget, model)
    return usual if text is None else usage(Workload.parse, text, usual)


def teller(*, quiet: bool) -> Callable[[str], None]:
    """The function that prints a line of progress."""

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def declaration_of(engine: str) -> Declaration:
    """The declaration of the engine that `--engine` names."""
    from dyno.settings import ENGINES

    check_choice("engine", engine, ENGINES)
    return declared(engine)


def text_of_load(workload: str | None, text: Path | None, *, foreign: bool) -> tuple[str | None, Path | None]:
    """The workload, and the text file from which a served load takes its prompts. The workload then has only
    the name of the file. For dyno, `--text FILE` can also name it. For other engines, that option is the text
    for the comparison of answers.
    """
    load = usage(Workload.parse, workload).served if workload is not None else None
    if load is None or (load.text is None and (text is None or foreign)):
        return workload, text
    named = text if load.text is None or text is None else Path(load.text)
    named = Path(load.text or "") if named is None else named
    if text is not None and text.absolute() != named.absolute():
        raise typer.BadParameter(f"--text is {text}, but --workload names {named}; give only one of them")
    if not named.is_file():
        raise typer.BadParameter(f"--workload serve: the file {named} does not exist")
    return str(Workload.of_served(dataclasses.replace(load, text=named.name))), named


def engine_options(
    engine: str, binaries: Path | None, text: Path | None, device: str, gpu: str | None, command: list[str]
) -> dict[str, Any]:
    """Options for the target of another engine; empty for dyno."""
    if not declaration_of(engine).foreign:
        if binaries is not None or command:
            raise typer.BadParameter("--bin and a command line after -- need --engine llama.cpp|ik_llama.cpp")
        return {}
    if binaries is None:
        raise typer.BadParameter(f"--engine {engine} needs the folder of its binaries; give --bin DIR")
    return {
        "binaries": str(binaries.absolute()),
        "gpu": gpu_list(device, gpu),
        "command": command,
        "text": str(text.absolute()) if text is not None else None,
    }


def gpu_list(device: str, gpu: str | None) -> list[int] | None:
    """GPU numbers for another engine, which can split a model over several GPUs; None: only the CPU."""
    names = device_names(device, gpu)
    return [int(n.removeprefix("cuda:")) for n in names] if names[0].startswith("cuda:") else None


def held_settings(pairs: list[str], engine: str) -> dict[str, Any]:
    """Settings of `--set NAME=VALUE`."""
    from dyno.settings import SETTINGS, unknown_setting

    held: dict[str, Any] = {}
    device = None if declaration_of(engine).foreign else "cpu"  # setting names are known without a model file
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {pair!r} is not of the form NAME=VALUE")
        if name not in SETTINGS:
            raise typer.BadParameter(f"--set: {unknown_setting(name, device, engine)}")
        try:
            held[name] = SETTINGS[name].parse(text, engine)
        except ValueError as error:
            raise typer.BadParameter(f"--set: {error}") from error
    return held


def check_writable(option: str, path: Path) -> None:
    """Check in advance that a file can be written at the end of all work. Raises TuneError."""
    if path.is_dir():
        raise TuneError(f"{option} {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise TuneError(f"{option} {path}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TuneError(f"{option} {path} is not writable; give another file")


def command_line(paths: Sequence[str] = ()) -> str:
    """This command in a form that can be repeated, without secrets, because it is recorded.

    Args:
        paths: Options before `--` whose values are recorded as absolute paths.
    """
    words = sys.argv[1:]
    for n in range(words.index("--") if "--" in words else len(words)):
        name, equals, value = words[n].partition("=")
        if name in paths and equals:
            words[n] = f"{name}={os.path.abspath(value)}"
        elif n and words[n - 1] in paths:
            words[n] = os.path.abspath(words[n])
    return shlex.join(["tune", *redact_words(words)])
