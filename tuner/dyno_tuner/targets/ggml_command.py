"""A user's own command line of llama.cpp or ik_llama.cpp: what of it is a knob, what llama-bench can be
given, what only serves, and what makes it impossible to measure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..target import Value
    from .ggml_help import Help

# First names, as the help lists them beside others; the help of the binary gives the aliases.
_KNOBS = {
    "-ub": "ubatch", "-t": "threads", "-tb": "threads_batch",
    "-fa": "flash_attention", "-amb": "attention_max_batch_mib", "-mla": "mla_mode",
    "-fmoe": "fused_moe", "-no-fmoe": "fused_moe", "-rtr": "cpu_repack",
}  # fmt: skip
_MLA = {"3": "auto", "1": "absorbed", "0": "expanded"}
_CUDA_KEYS = {
    "graphs": "cuda_graphs", "fusion": "fusion", "mmq-id-size": "mmq_id_size",
    "offload-batch-size": "offload_min_tokens",
}  # fmt: skip
_HOST = frozenset({"-ot", "-cmoe", "-ncmoe"})
_CARRIED = frozenset(
    {"-ngl", "-ot", "-cmoe", "-ncmoe", "-sm", "-mg", "-ts", "-nkvo", "--numa", "--no-mmap", "-ctk", "-ctv"}
)
# Neither the speed of a prompt nor that of a token of one sequence depends on them.
_SERVING = frozenset({
    "-m", "-c", "-n", "-np", "-cb", "--host", "--port", "--jinja", "--api-key", "--alias", "-a", "--temp",
    "--top-k", "--top-p", "--min-p", "--seed", "-s", "--chat-template", "--chat-template-file", "--metrics",
    "--slots", "--no-webui", "--log-disable", "--no-warmup", "--mlock", "-p", "-f", "--timeout", "-to",
    "--reasoning-format", "--reasoning-budget", "--path", "--props", "-v",
})  # fmt: skip


@dataclass
class Command:
    """A command line taken apart."""

    program: str = ""
    env: dict[str, str] = field(default_factory=dict)
    incumbent: dict[str, Value] = field(default_factory=dict)  # settings that the search may change
    bench: list[str] = field(default_factory=list)  # what llama-bench is given in every run
    kept: list[str] = field(default_factory=list)  # every other token, as the user wrote it
    batch: int = 2048
    host_weights: bool = False  # by rules for tensors
    gpu_layers: int | None = None
    value_cache: str = "f16"


def parse_command(tokens: Sequence[str], help_: Help, bench: Help, engine: str) -> Command:
    """Args:
        tokens: `[NAME=VALUE…] [program] flags…`.
        help_: of the tool that the command line starts.
        bench: of llama-bench.

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
            raise TuneError(f"the command line's {token!r} is no flag of this {out.program or 'binary'}")
        values: list[str] = []
        # The help of older ik_llama.cpp shows these without their argument.
        if flag.argument or "-mla" in flag.names or "-amb" in flag.names:
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
    knob = next((_KNOBS[n] for n in sorted(names) if n in _KNOBS), None)
    if knob is not None:
        out.incumbent[knob] = _knob_value(knob, token, names, values)
    elif "-b" in names:
        out.batch = _integer(values[0], token)
        out.kept += [token, *values] if "=" not in token else [token]
    elif "-cuda" in names:
        _cuda_pairs(out, values[0])
    elif "-op" in names:
        raise TuneError(
            f"the command line's {token} sets an offload policy, which llama-bench can't be given; leave it "
            "out of what is tuned"
        )
    else:
        out.kept += [token] if "=" in token else [token, *values]
        if names & _CARRIED:
            out.bench += _for_bench(token, names, values, bench)
            out.host_weights |= bool(names & _HOST)
            if "-ctv" in names:
                out.value_cache = values[0]
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


def _knob_value(knob: str, token: str, names: frozenset[str], values: list[str]) -> Value:
    if knob == "flash_attention":
        return not values or values[0].lower() in ("on", "auto", "1", "true", "enabled")
    if knob == "fused_moe":
        return "-no-fmoe" not in names
    if knob == "cpu_repack":
        return True
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
    wanted = ["-ncmoe", "--n-cpu-moe"] if names & {"-cmoe", "-ncmoe"} else sorted(names, key=len)
    if "--no-mmap" in names:
        wanted, values = ["-mmp"], ["0"]
    elif "-cmoe" in names:
        values = ["999"]
    elif "-nkvo" in names:
        values = ["1"]
    elif "-ts" in names:
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
