"""A user's own command line of llama.cpp or ik_llama.cpp: what of it is a knob, what llama-bench can be
given, what only serves, and what makes it impossible to measure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import TuneError
from .ggml_spell import CUDA_KEYS, MLA, from_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..target import Value
    from .ggml_help import Help

# First names, as the help lists them beside others; the help of the binary gives the aliases.
_KNOBS = {
    "-ub": "ubatch", "-t": "threads", "-tb": "threads_batch",
    "-fa": "flash_attention", "-amb": "attention_max_batch_mib", "-mla": "mla_mode",
    "-fmoe": "fused_moe", "-no-fmoe": "fused_moe", "-rtr": "cpu_repack", "--repack": "cpu_repack",
    "-no-fa": "flash_attention",
}  # fmt: skip
_MLA = {flag: name for name, flag in MLA.items()}
_CUDA_KEYS = {key: name for name, key in CUDA_KEYS.items()}
_CARRIED = frozenset({"-ngl", "-ot", "-mg", "-ts", "-nkvo", "--numa", "--no-mmap", "-dev"})
_CACHE = {"-ctk": "kv_type_k", "-ctv": "kv_type_v"}
# Names that share a row of the help with their opposite; where the user wrote the other, nothing is meant.
_OPPOSITES = {
    "-kvo": "-nkvo", "--kv-offload": "-nkvo", "--mmap": "--no-mmap", "--op-offload": "--no-op-offload",
}  # fmt: skip
# Neither the speed of a prompt nor that of a token of one sequence depends on them.
_SERVING = frozenset({
    "-m", "-c", "-n", "-np", "-cb", "--host", "--port", "--jinja", "--api-key", "--alias", "-a", "--temp",
    "--top-k", "--top-p", "--min-p", "--seed", "-s", "--chat-template", "--chat-template-file", "--metrics",
    "--slots", "--no-webui", "--log-disable", "--no-warmup", "--mlock", "-p", "-f", "--timeout", "-to",
    "--reasoning-format", "--reasoning-budget", "--path", "--props", "-v",
})  # fmt: skip


# ik_llama.cpp's help shows these without the argument that they take.
_UNTOLD = frozenset({"-mla", "-amb", "-cuda", "-ser", "-grt", "-gap", "-dsatk", "-draft"})


@dataclass
class Command:
    """A command line taken apart."""

    program: str = ""
    env: dict[str, str] = field(default_factory=dict)
    incumbent: dict[str, Value] = field(default_factory=dict)  # settings that the search may change
    # Placement and cache: where the search starts from.
    base: dict[str, Value] = field(default_factory=dict)
    policy: dict[int, bool] = field(default_factory=dict)  # of `-op`: offloaded or not, by the op's id
    bench: list[str] = field(default_factory=list)  # what llama-bench is given in every run
    common: list[str] = field(default_factory=list)  # the same for the other tools
    carried: set[str] = field(default_factory=set)  # first names of those flags
    kept: list[str] = field(default_factory=list)  # every other token, as the user wrote it
    batch: int = 2048
    host_weights: bool = False  # by rules for tensors
    gpu_layers: int | None = None


def parse_command(tokens: Sequence[str], help_: Help, bench: Help, engine: str, help_of: str = "") -> Command:
    """Args:
        tokens: `[NAME=VALUE…] [program] flags…`.
        help_: of the tool that the command line starts.
        bench: of llama-bench.
        help_of: whose help that is, for messages.

    Raises:
        TuneError: a flag that this binary does not have, or that llama-bench can't reproduce. To leave it
            out silently would measure something else than what the user runs.
    """
    out = Command()
    rest = list(tokens)
    while rest and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        out.env[name] = value
    if rest and not rest[0].startswith("-"):
        out.program = os.path.basename(rest.pop(0))
    _variables(out, engine)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        flag = help_.get(name if equals else token)
        if flag is None:
            raise TuneError(f"the command line's {token!r} is no flag of {help_of or 'this binary'}")
        values: list[str] = []
        if flag.argument or _UNTOLD & set(flag.names):
            if equals:
                values = [value]
            elif rest:
                values = [rest.pop(0)]
            else:
                raise TuneError(f"the command line's {token!r} needs a value")
        _take(out, token, frozenset(flag.names), values, bench)
    return out


def _variables(out: Command, engine: str) -> None:
    if engine == "llama.cpp":
        if "GGML_CUDA_DISABLE_GRAPHS" in out.env:  # even =0 counts as set
            del out.env["GGML_CUDA_DISABLE_GRAPHS"]
            out.incumbent["cuda_graphs"] = False
        if "GGML_CUDA_GRAPH_OPT" in out.env:
            out.incumbent["graph_concurrency"] = out.env.pop("GGML_CUDA_GRAPH_OPT") == "1"
        if "GGML_CUDA_DISABLE_FUSION" in out.env:
            out.incumbent["fusion"] = (
                _integer(out.env.pop("GGML_CUDA_DISABLE_FUSION"), "GGML_CUDA_DISABLE_FUSION") == 0
            )
        if "GGML_OP_OFFLOAD_MIN_BATCH" in out.env:
            name = "GGML_OP_OFFLOAD_MIN_BATCH"
            out.incumbent["offload_min_tokens"] = _integer(out.env.pop(name), name)


def _take(out: Command, token: str, names: frozenset[str], values: list[str], bench: Help) -> None:
    own = token.partition("=")[0]
    if own in _OPPOSITES and _OPPOSITES[own] in names:
        out.kept += [token]  # what the engine does by itself
        return
    knob = next((_KNOBS[n] for n in sorted(names) if n in _KNOBS), None)
    cache = next((_CACHE[n] for n in names if n in _CACHE), None)
    if knob is not None:
        out.incumbent[knob] = _knob_value(knob, token, own, names, values)
    elif cache is not None:
        out.base[cache] = values[0].lower()
    elif names & {"-cmoe", "-ncmoe", "-sm"} or ("-ot" in names and from_buffers(values[0]) is not None):
        _place(out, token, names, values)
    elif "-b" in names:
        out.batch = _integer(values[0], token)
        out.kept += [token, *values] if "=" not in token else [token]
    elif "-cuda" in names:
        _cuda_pairs(out, values[0])
    elif "-op" in names:
        _policy(out, token, values[0])
    else:
        given = [token] if "=" in token else [token, *values]
        out.kept += given
        if names & _CARRIED:
            out.carried |= names & _CARRIED
            out.bench += _for_bench(token, names, values, bench)
            out.common += given
            out.host_weights |= "-ot" in names
            if "-ngl" in names and values[0].isdigit():
                out.gpu_layers = int(values[0])
        elif "-fit" in names or names & {"--fit"}:
            if values != ["off"]:
                raise TuneError("the command line's --fit lets the engine choose; give -ngl or -ot instead")
        elif not names & _SERVING:
            raise TuneError(
                f"the command line's {token} can't be reproduced in llama-bench, so what would be measured "
                "is not what you run; leave it out of what is tuned"
            )


def _policy(out: Command, token: str, text: str) -> None:
    numbers = [_integer(part, token) for part in text.split(",")]
    if len(numbers) % 2 or any(on not in (0, 1) for on in numbers[1::2]):
        raise TuneError(f"the command line's {token} {text!r} is no list of ID,0|1 pairs")
    out.policy |= {i: bool(on) for i, on in zip(numbers[::2], numbers[1::2], strict=True)}


def _place(out: Command, token: str, names: frozenset[str], values: list[str]) -> None:
    if "-sm" in names:
        out.base["split_mode"] = values[0]
        return
    out.host_weights = True
    if "-ot" in names:
        rules = [str(out.base["placement"])] if "placement" in out.base else []
        out.base["placement"] = ",".join([*rules, from_buffers(values[0]) or ""])
    else:
        # More layers than any model has: all of them.
        out.base["cpu_moe_layers"] = 999 if "-cmoe" in names else _integer(values[0], token)
    if {"placement", "cpu_moe_layers"} <= set(out.base):
        raise TuneError(
            f"the command line's {token}: -ot and -cmoe or -ncmoe can't be told apart; write all of it "
            "as -ot rules"
        )


def _knob_value(knob: str, token: str, own: str, names: frozenset[str], values: list[str]) -> Value:
    if "-no-fa" in names:
        return False
    if knob == "flash_attention":
        return not values or values[0].lower() in ("on", "auto", "1", "true", "enabled")
    if knob == "fused_moe":
        return "-no-fmoe" not in names
    if knob == "cpu_repack":
        return own not in ("-nr", "--no-repack")
    if knob == "mla_mode":
        if values[0] not in _MLA:
            raise TuneError(f"the command line's {token} {values[0]}: 0, 1 and 3 can be tuned from")
        return _MLA[values[0]]
    return _integer(values[0], token)


def _cuda_pairs(out: Command, text: str) -> None:
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if key not in _CUDA_KEYS or not equals:
            raise TuneError(f"the command line's -cuda {pair}: known are {', '.join(_CUDA_KEYS)}")
        number = _integer(value, f"-cuda {key}")
        out.incumbent[_CUDA_KEYS[key]] = bool(number) if key in ("graphs", "fusion") else number


def _for_bench(token: str, names: frozenset[str], values: list[str], bench: Help) -> list[str]:
    """The same in llama-bench, whose lists are separated otherwise."""
    wanted = sorted(names, key=len)
    if "--no-mmap" in names:
        wanted, values = ["-mmp"], ["0"]
    elif "-nkvo" in names:
        wanted, values = ["-nkvo"], ["1"]
    elif names & {"-ts", "-dev"}:
        values = [values[0].replace(",", "/")]
    elif "-ngl" in names:
        values = [{"all": "999", "auto": "999"}.get(values[0], values[0])]
    elif "-ot" in names and bench.has("-nopo"):
        values = [values[0].replace(",", ";")]  # there a comma separates tests
    flag = bench.get(*wanted)
    if flag is None:
        raise TuneError(f"the command line's {token} has no counterpart in this llama-bench")
    return [next(n for n in wanted if n in flag.names), *values]


def _integer(text: str, name: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise TuneError(f"the command line's {name} {text!r} is not a whole number")
    return int(text)
