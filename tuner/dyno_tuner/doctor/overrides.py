"""Rules for `-ot` and `-dev`: the splitting of their values, and patterns and names that cannot work.

Both engines split at commas (llama-bench of llama.cpp also at semicolons) and at the first `=`. Neither trims
blanks, and no tensor name contains a blank. llama.cpp stops at an unknown device, and ik_llama.cpp leaves it
out.
"""

from __future__ import annotations

import re
import warnings

from .line import IK, IK_SOURCE, MAIN, MAIN_SOURCE, Line, Status, nearest

_BACKENDS = (
    "CUDA", "ROCm", "MUSA", "Vulkan", "SYCL", "CANN", "Metal", "MTL", "OpenCL", "GPUOpenCL", "WebGPU", "HTP",
)  # fmt: skip
_UNNUMBERED = ("Metal", "OpenCL")
_BLAS = "BLAS"  # a device without a number, whose buffers belong to the CPU
_NAMES = (*_BACKENDS, *_UNNUMBERED, _BLAS, "CPU", "RPC")
_BROKEN = {
    "missing )": "a ( is not closed; write \\( for a parenthesis",
    "unbalanced parenthesis": "a ) closes nothing; write \\) for a parenthesis",
    "unterminated character set": "a [ is not closed; write \\[ for a bracket",
    "bad character range": "a range such as z-a ends before it begins",
    "nothing to repeat": "a *, + or ? follows nothing; write .* for any characters",
    "bad escape (end of pattern)": "a \\ at the end escapes nothing",
}
_SOURCES = {
    IK: f"{IK_SOURCE}, common.cpp parse_buft_overrides",
    MAIN: f"{MAIN_SOURCE}, common/arg.cpp parse_tensor_buffer_overrides",
}


def override_rules(line: Line) -> None:
    """Report each rule of an `-ot` that matches nothing or stops the program."""
    source = _SOURCES[line.engine]
    separators = "[,;]" if line.bench and line.engine == MAIN else ","
    _devices(line)
    for item in line.flags("-ot", "-otd"):
        if item.flag is None:
            continue
        for rule in re.split(separators, item.value or ""):
            pattern, equals, buffer = rule.partition("=")
            if not equals:
                item.say(Status.INVALID, f"rule {rule!r} is not PATTERN=BUFFER, so the program stops", source)
                continue
            if pattern != pattern.strip():
                where = "begins" if pattern[:1].isspace() else "ends"
                item.say(
                    Status.INVALID,
                    f"pattern {pattern!r} {where} with a blank, which {line.engine} does not trim, so that "
                    f"it never matches; write {pattern.strip() + '=' + buffer.strip()!r}",
                    source,
                )
            if why := broken_pattern(pattern):
                item.say(
                    Status.INVALID,
                    f"pattern {pattern!r} is no regular expression, so the program stops: {why}",
                    source,
                )
            if buffer != buffer.strip():
                item.say(
                    Status.INVALID,
                    f"buffer {buffer!r} has a blank, which {line.engine} does not trim, so that the program "
                    "stops at an unknown buffer",
                    source,
                )
            elif why := unknown_place(buffer, line.facts.gpus, "buffer"):
                item.say(Status.INVALID, f"{why}: the program stops", source)


def broken_pattern(pattern: str) -> str:
    """The reason why no engine can read a regular expression; "" if one may be able to.

    Python reads other extensions than ECMAScript, but brackets and repeats mean the same.
    """
    try:
        compiled(pattern)
    except re.error as error:
        return next((why for told, why in _BROKEN.items() if error.msg.startswith(told)), "")
    except (RecursionError, OverflowError):
        return ""
    return ""


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of the engines, which Python usually reads in the same way.

    Raises:
        re.error: Python cannot read it, or reads it otherwise, such as [[:alpha:]].
        RecursionError, OverflowError: It is too deep, or repeats too often.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        try:
            return re.compile(pattern)
        except FutureWarning as error:
            raise re.error(str(error), pattern) from error


def unknown_place(name: str, gpus: int | None, what: str) -> str:
    """The reason why a line can't name this buffer or device; "" if it can.

    The name of a device is the name of its backend with a number. The buffer of a device has the name of the
    device.

    Args:
        gpus: Number of GPUs; None: unknown.
        what: "buffer" or "device", for the message.
    """
    if name == "CPU" or name.startswith("RPC"):
        return ""
    found = re.fullmatch(r"([A-Za-z]+)([0-9]*)", name)
    backend, number = (found[1], found[2]) if found else ("", "")
    unnumbered = (*_UNNUMBERED, _BLAS) if what == "device" else _UNNUMBERED
    if backend not in (_BACKENDS if number else unnumbered):
        known = ["CPU", *(f"{b}0" for b in _BACKENDS if b not in _UNNUMBERED), *unnumbered]
        near = nearest(name.upper(), (k.upper() for k in known))
        hint = next((f" (nearest: {k})" for k in known if k.upper() == near), "")
        write = "none, CUDA0, CUDA1, …" if what == "device" else "CPU, CUDA0, CUDA1, …"
        return f"no backend has a {what} {name!r}; write {write}{hint}"
    if backend == "CUDA" and gpus is not None and int(number) >= gpus:
        there = f"the last one is CUDA{gpus - 1}" if gpus else "there is no GPU"
        return f"{what} {name} is beyond the {gpus} GPUs; {there}"
    return ""


def _devices(line: Line) -> None:
    for item in line.flags("-dev", "-devd"):
        names = (item.value or "").split(",")
        for name in names:
            if name and (why := _no_device(name, len(names) == 1, line)):
                item.say(Status.INVALID, why, line.source)


def _no_device(name: str, alone: bool, line: Line) -> str:
    """The reason why a line can't name this device; "" if it can.

    Args:
        alone: Whether it is the only device of the list.
    """
    main = line.engine == MAIN
    effect = "the program stops" if main else "the device is left out"
    if name != name.strip():
        return (
            f"device {name!r} has a blank, which {line.engine} does not trim, so that {effect}; "
            f"write {name.strip()!r}"
        )
    if name == "none":
        return "" if alone or not main else f"none cannot be combined with another device: {effect}"
    if main:  # it ignores case, and accepts all devices but the CPU
        name = next((b + name[len(b) :] for b in _NAMES if name[: len(b)].upper() == b.upper()), name)
        if name == "CPU":
            return f"llama.cpp does not accept the CPU as a device: {effect}; write none"
    return unknown_place(name, line.facts.gpus, "device")
