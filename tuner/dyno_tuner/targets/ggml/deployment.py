"""Exports of a llama-server and its profile for Docker Compose, for Helm, and as a preset of llama-server's
router.

`words` is a command line that begins with the program. Each text is quoted as its reader needs it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import yaml

from ...core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dyno import profiles

    from .help import Help

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_LLAMA_IMAGE = "${LLAMA_SERVER_IMAGE:?name an image whose entry point is llama-server}"
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def _gpus(profile: profiles.Profile, env: Mapping[str, str | None]) -> list[str] | None:
    """Numbers of the measured GPUs; None for a CPU, empty if they are unknown."""
    if profile.match.device.kind == "cpu":
        return None
    told = env.get("CUDA_VISIBLE_DEVICES")
    return told.split(",") if told else []


def _variables(env: Mapping[str, str | None], tell: Callable[[str], None]) -> dict[str, str]:
    """The variables to set in a container. The choice of GPUs is left out, because the container runtime
    makes it."""
    unset = sorted(name for name, value in env.items() if value is None)
    if unset:
        tell(f"{', '.join(unset)}: has to be absent from the image's environment as well")
    return {n: v for n, v in sorted(env.items()) if v is not None and n not in _VISIBLE}


def compose(
    words: Sequence[str], env: Mapping[str, str | None], profile: profiles.Profile, files: Sequence[str],
    tell: Callable[[str], None], *, name: str = "llama-server", image: str = _LLAMA_IMAGE,
) -> str:  # fmt: skip
    """A service for Docker Compose.

    Args:
        words: the command line; the program is left out.
        env: variables; None for a variable that must be absent.
        files: paths of files, such as the model, whose folders are mounted read-only at the same place.
        tell: called with a line about each thing that the text cannot hold.
        name: the name of the service.
        image: the image, whose entry point is the program.
    """

    def plain(text: str) -> str:
        return text.replace("$", "$$")  # Compose expands variables everywhere

    service: dict[str, Any] = {
        "image": image,
        "command": [plain(word) for word in words[1:]],
        "restart": "on-failure",
        "volumes": [
            {"type": "bind", "source": plain(folder), "target": plain(folder), "read_only": True}
            for folder in dict.fromkeys(map(os.path.dirname, files))
        ],
    }
    variables = _variables(env, tell)
    if variables:
        service["environment"] = {name: plain(value) for name, value in variables.items()}
    gpus = _gpus(profile, env)
    if gpus is not None:
        which: dict[str, Any] = {"device_ids": gpus} if gpus else {"count": "all"}
        device = {"driver": "nvidia", **which, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return _yaml({"services": {name: service}})


def helm_values(
    words: Sequence[str], env: Mapping[str, str | None], profile: profiles.Profile,
    files: Mapping[str, str], tell: Callable[[str], None],
) -> str:  # fmt: skip
    """Values for a chart that takes `args`, `env`, `resources` and `nodeSelector` as a pod does.

    Kubernetes expands `$(NAME)`, so a dollar before a parenthesis is doubled.
    """

    def plain(text: str) -> str:
        return text.replace("$(", "$$(")

    values: dict[str, Any] = {"args": [plain(word) for word in words[1:]]}
    variables = _variables(env, tell)
    if variables:
        values["env"] = [{"name": name, "value": plain(value)} for name, value in variables.items()]
    gpus = _gpus(profile, env)
    device = profile.match.device
    if gpus is not None and device.kind == "cuda":
        major, _, minor = device.compute_capability.partition(".")
        values["resources"] = {"limits": {"nvidia.com/gpu": max(1, len(gpus))}}
        values["nodeSelector"] = {
            "nvidia.com/gpu.compute.major": major, "nvidia.com/gpu.compute.minor": minor,
        }  # fmt: skip
    values |= {name: {"path": path} for name, path in files.items()}
    return _yaml(values)


def models_ini(
    words: Sequence[str], env: Mapping[str, str | None], help_: Help, model: str, tell: Callable[[str], None]
) -> str:
    """A preset for `llama-server --models-preset`, one section for the model.

    Keys are long names of flags without dashes. A switch without a value is `true`; its negation keeps `no-`.

    Raises:
        TuneError: This llama-server has no presets, a flag has no long name, or a value contains a line
            break.
    """
    if not help_.has("--models-preset"):
        raise TuneError("this llama-server has no --models-preset; use another form")
    lines = [f"[{_section(model)}]"]
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        flag = help_.get("-m" if name == "--model" else name)
        if flag is None:
            raise TuneError(f"{word!r} is not a flag of this llama-server")
        if flag.argument and not equals:
            if not rest:
                raise TuneError(f"{word} has no value")
            value = rest.pop(0)
        key = _key(name, flag.names, negated=not flag.argument)
        lines.append(f"{key} = {_line(value, name) if flag.argument else 'true'}")
    for name, given in sorted(env.items()):
        tell(f"{'unset ' if given is None else ''}{name}{'' if given is None else f'={given}'}: "
             "a preset holds no environment; the router has to start with it")  # fmt: skip
    return "\n".join(["version = 1", "", *lines, ""])


def _section(model: str) -> str:
    name = os.path.basename(model).removesuffix(".gguf")
    if "]" in name or "[" in name or _CONTROL.search(name):
        raise TuneError(f"{model!r}: a file name with brackets or control characters cannot name a preset")
    return name


def _key(name: str, names: Sequence[str], *, negated: bool) -> str:
    """The long name of a flag. If one row has a switch and its opposite, the one on the command line is
    taken."""
    longs = [n for n in names if n.startswith("--")]
    off = [n for n in longs if n.startswith("--no-")]
    is_off = (
        negated and bool(off) and (name.startswith(("--no-", "-n")) and name not in set(longs) - set(off))
    )
    fitting = off if is_off else [n for n in longs if n not in off] or longs
    if not fitting:
        raise TuneError(f"{name} has no long name in this llama-server, which a preset needs")
    return (name if name in fitting else fitting[0]).removeprefix("--")


def _line(value: str, name: str) -> str:
    if _CONTROL.search(value) or value != value.strip() or value[:1] in (";", "#"):
        raise TuneError(f"{name}: {value!r} cannot stand in a preset, whose values are parts of lines")
    return value


def _yaml(data: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=2**20))
