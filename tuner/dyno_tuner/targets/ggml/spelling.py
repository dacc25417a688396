"""Flags for settings: how llama-bench and the common tools (llama-server, llama-perplexity, …) of llama.cpp
and ik_llama.cpp take each setting. The `--help` of the binary decides."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dyno._setting import split_rules

from ...core.errors import TargetFailure
from ...core.protocol import TrialStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...core.protocol import Settings, Value
    from .help import Help

MLA = {"auto": "3", "absorbed": "1", "expanded": "0"}
CUDA_KEYS = {
    "cuda_graphs": "graphs", "fusion": "fusion", "mmq_id_size": "mmq-id-size",
    "offload_min_tokens": "offload-batch-size",
}  # fmt: skip
# Variable, its value for true, its value for false. Engines only test whether the first one exists, so off
# means absent.
VARIABLES: dict[str, tuple[str, str | None, str | None]] = {
    "cuda_graphs": ("GGML_CUDA_DISABLE_GRAPHS", None, "1"),
    "graph_concurrency": ("GGML_CUDA_GRAPH_OPT", "1", None),
    "fusion": ("GGML_CUDA_DISABLE_FUSION", None, "1"),
    "offload_min_tokens": ("GGML_OP_OFFLOAD_MIN_BATCH", None, None),
}
# Op families by the names that ik_llama.cpp prints. Each binary is asked for the ids.
OP_NAMES = {
    "embed": "GET_ROWS", "matmul": "MUL_MAT", "matmul_id": "MUL_MAT_ID", "up_gate": "FUSED_UP_GATE",
    "moe_up_gate": "MOE_FUSED_UP_GATE",
}  # fmt: skip
_TYPES = {"q8_kv": "q8_KV"}  # where the engine uses capitals


class NoSpelling(TargetFailure):
    """An error: a tool has no flag for a setting or workload, which the message names."""

    def __init__(self, message: str) -> None:
        super().__init__(TrialStatus.INVALID, message)


@dataclass
class Spelled:
    """A configuration as words and variables of a process. A variable that is None must be absent."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    cuda: dict[str, str] = field(default_factory=dict)  # pairs of the single `-cuda` of ik_llama.cpp
    policy: dict[int, int] = field(default_factory=dict)  # pairs of the single `-op`: op id -> offloaded

    def all_args(self) -> list[str]:
        pairs = ",".join(f"{k}={v}" for k, v in self.cuda.items())
        ops = ",".join(f"{i},{on}" for i, on in sorted(self.policy.items()))
        return [*self.args, *(["-op", ops] if ops else []), *(["-cuda", pairs] if pairs else [])]


def spell(
    settings: Settings, engine: str, help_: Help, *, bench: bool, batch: int = 2048,
    metric: str | None = None, op_ids: Mapping[str, int] | None = None,
    cuda: Mapping[str, str] | None = None,
) -> Spelled:  # fmt: skip
    """The words and variables that pass settings to a tool of an engine.

    Args:
        help_: help of the tool that is started.
        bench: whether the tool is llama-bench, whose flags differ.
        batch: the logical batch, at least the u-batch.
        metric: metric of a run of llama-bench, which takes one number of threads: that of this metric.
        op_ids: op ids by name in this binary, for `op_offload.*`.
        cuda: further pairs for the single `-cuda`.

    Raises:
        NoSpelling: this tool has no flag for a setting.
    """
    out = Spelled(cuda=dict(cuda or {}))
    ik = engine == "ik_llama.cpp"
    for name, value in settings.items():
        text = str(value)
        if name == "ubatch":
            out.args += ["-ub", text]
            if int(value) > batch or bench:
                out.args += ["-b", str(max(batch, int(value)))]
        elif name in ("sequences", "batch"):
            if not bench:
                out.args += [_need(help_, name, "-np" if name == "sequences" else "-b"), text]
        elif name == "kv_unified" and not ik:
            out.args += [] if bench else _unified(bool(value), help_)
        elif name in ("spec", "spec_max"):
            if name == "spec" and not bench:
                out.args += _drafts(text, settings.get("spec_max"), help_, ik=ik)
        elif name in ("threads", "threads_batch"):
            if not bench:
                out.args += ["-t" if name == "threads" else "-tb", text]
            elif metric is None or (name == "threads_batch") == (metric == "pp"):
                out.args += ["-t", text]
        elif name == "flash_attention":
            out.args += _fa(bool(value), help_, bench=bench)
        elif name in ("kv_type_k", "kv_type_v"):
            out.args += [_need(help_, name, f"-ct{name[-1]}"), _TYPES.get(text, text)]
        elif name in ("placement", "n_cpu_moe", "split_mode"):
            out.args += _placed(name, value, help_, bench=bench, ik=ik)
        elif name == "cpu_repack":
            out.args += _repack(bool(value), help_, bench=bench, ik=ik)
        elif name == "fused_moe" and ik:
            out.args += _fmoe(bool(value), help_, bench=bench)
        elif name == "mla_mode" and ik:
            out.args += [_need(help_, name, "-mla"), MLA[text]]
        elif name == "attention_max_batch_mib" and ik:
            out.args += [_need(help_, name, "-amb"), text]
        elif name.startswith("op_offload.") and ik:
            _policy(out, name, bool(value), help_, op_ids)
        elif ik and name in CUDA_KEYS:
            _need(help_, name, "-cuda")
            out.cuda[CUDA_KEYS[name]] = str(int(value))
        elif not ik and name in VARIABLES:
            variable, on, off = VARIABLES[name]
            out.env[variable] = text if name == "offload_min_tokens" else on if value else off
        else:
            raise NoSpelling(f"{name} has no spelling in {engine}")
    return out


def rules_text(rules: Value | Iterable[str]) -> str:
    """Placement rules as one word, e.g. `a=cpu,b=cuda:0`."""
    return rules if isinstance(rules, str) else ",".join(str(r) for r in rules)  # type: ignore[union-attr]


def to_buffers(rules: str) -> str:
    """Placement rules with the engines' names of buffers: `exps=cpu,x=cuda:1` becomes `exps=CPU,x=CUDA1`.

    Raises:
        NoSpelling: A regular expression holds a comma, at which these engines split.
    """
    parts = [r.rpartition("=") for r in split_rules(rules)]
    for pattern, *_ in parts:
        if "," in pattern:
            raise NoSpelling(
                f"placement: llama.cpp and ik_llama.cpp split {pattern!r} at its comma; write it without one"
            )
    return ",".join(f"{p}={'CPU' if d == 'cpu' else 'CUDA' + d.removeprefix('cuda:')}" for p, _, d in parts)


def from_buffers(text: str) -> str | None:
    """The inverse of `to_buffers`; None for a buffer without a name in profiles."""
    rules: list[str] = []
    for rule in text.split(","):
        pattern, equals, buffer = rule.rpartition("=")
        number = re.fullmatch(r"CUDA([0-9]{1,3})", buffer)
        if not equals or not pattern or not (buffer == "CPU" or number):
            return None
        rules.append(f"{pattern}={'cpu' if number is None else f'cuda:{int(number[1])}'}")
    return ",".join(rules)


def _drafts(kind: str, most: Value | None, help_: Help, *, ik: bool) -> list[str]:
    """Flags for n-gram speculation and the length of a draft. ik_llama.cpp has a separate stage for it."""
    flag = _need(help_, "spec", "--spec-type")
    if kind not in ("off", "ngram"):
        raise NoSpelling(f"spec {kind} needs files and flags that a setting does not hold")
    if kind == "off":
        return [flag, "none"]
    if ik:
        return [flag, "ngram-simple" if most is None else f"ngram-simple:n_max={most}"]
    length = [] if most is None else [_need(help_, "spec_max", "--spec-ngram-simple-size-m"), str(most)]
    return [flag, "ngram-simple", *length]


def _unified(on: bool, help_: Help) -> list[str]:
    """One buffer for all sequences. Older versions only have a switch for on, which is off by default."""
    if on:
        return [_need(help_, "kv_unified", "-kvu")]
    return ["-no-kvu"] if help_.has("-no-kvu") else []


def _need(help_: Help, setting: str, *names: str) -> str:
    flag = help_.get(*names)
    if flag is None:
        raise NoSpelling(f"{setting}: this binary has no {' or '.join(names)}")
    return next(n for n in names if n in flag.names)


def _fa(on: bool, help_: Help, *, bench: bool) -> list[str]:
    """Flash attention, in one of three forms: a switch (before autumn 2025), 0|1, or on|off|auto."""
    name = _need(help_, "flash_attention", "-fa", "--flash-attn")
    flag = help_.flags[name]
    if not flag.argument and not bench:
        return [name] if on else []
    if "on" in flag.choices or (not bench and "on" in flag.argument):
        return [name, "on" if on else "off"]
    return [name, "1" if on else "0"]


def _fmoe(on: bool, help_: Help, *, bench: bool) -> list[str]:
    """Fused experts. llama-bench takes 0|1. The common tools first had a switch for on, later one for off."""
    if bench:
        return [_need(help_, "fused_moe", "-fmoe"), str(int(on))]
    if help_.has("-no-fmoe"):
        return [] if on else ["-no-fmoe"]
    return [_need(help_, "fused_moe", "-fmoe")] if on else []


def _repack(on: bool, help_: Help, *, bench: bool, ik: bool) -> list[str]:
    """Repacking of weights: off by default in ik_llama.cpp, on by default in llama.cpp."""
    name = _need(help_, "cpu_repack", "-rtr" if ik else "--repack" if bench else "-nr")
    if bench:
        return [name, str(int(on))]
    return [name] if on == ik else []


def _placed(name: str, value: Value, help_: Help, *, bench: bool, ik: bool) -> list[str]:
    """A setting of placement. The engine's default adds no words, so binaries without the flag can run it."""
    if name == "split_mode":
        return [_need(help_, name, "-sm"), str(value)]
    if name == "n_cpu_moe":
        if not value:
            return []
        if not help_.has("-ncmoe", "--n-cpu-moe") and help_.has("-ot"):
            layers = "|".join(map(str, range(int(value))))  # the layers that the flag would move
            return ["-ot", rf"blk\.({layers})\.ffn_(up|down|gate)_exps=CPU"]
        return [_need(help_, name, "-ncmoe", "--n-cpu-moe"), str(int(value))]
    rules = to_buffers(rules_text(value))
    if bench and not ik:
        rules = rules.replace(",", ";")  # in llama-bench a comma separates tests
    return [_need(help_, name, "-ot"), rules] if rules else []


def _policy(out: Spelled, name: str, on: bool, help_: Help, ids: Mapping[str, int] | None) -> None:
    if on:
        return  # the default of the engine
    _need(help_, name, "-op")
    op = OP_NAMES[name.removeprefix("op_offload.")]
    if ids is None or op not in ids:
        raise NoSpelling(f"{name}: the id of {op} in this binary is unknown, and dyno does not guess")
    out.policy[ids[op]] = 0
