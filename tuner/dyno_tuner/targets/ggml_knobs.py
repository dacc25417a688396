"""The settings of llama.cpp and ik_llama.cpp that are searched, which values, and how each is spelled for
llama-bench and for the common tools (llama-server, llama-perplexity, …).

A setting that this binary can't be asked for, or that cannot matter here, is refused by name with the
reason; nothing is passed on the hope that it might exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno.settings import SETTINGS, settings_for

from ..knobs import Fidelity, Kind, Knob

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ..target import Settings, Value, Workload
    from .ggml_help import Help
    from .ggml_install import Installation

_MLA = {"auto": "3", "absorbed": "1", "expanded": "0"}
_UBATCHES = tuple(1 << p for p in range(6, 14))
SEARCHED = (
    "ubatch", "threads", "threads_batch", "flash_attention", "cuda_graphs",
    "graph_concurrency", "fusion", "fused_moe", "mmq_id_size", "offload_min_tokens", "mla_mode",
    "attention_max_batch_mib", "cpu_repack",
)  # fmt: skip


@dataclass
class Spelled:
    """A configuration as a process is started with it. A variable that is None has to be absent."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)
    cuda: dict[str, str] = field(default_factory=dict)  # of the one `-cuda` of ik_llama.cpp

    def all_args(self) -> list[str]:
        pairs = ",".join(f"{k}={v}" for k, v in self.cuda.items())
        return [*self.args, *(["-cuda", pairs] if pairs else [])]


@dataclass(frozen=True)
class Here:
    """What decides whether a setting exists and matters."""

    install: Installation
    device: Mapping[str, Any]
    model: Mapping[str, Any]
    host_weights: bool  # weights stay in host memory although there is a GPU

    @property
    def ik(self) -> bool:
        return self.install.engine == "ik_llama.cpp"

    @property
    def cuda(self) -> bool:
        return self.device.get("kind") == "cuda"

    @property
    def capability(self) -> float:
        return float(self.device.get("compute_capability") or 0)


def _flag(here: Here, name: str) -> str:
    """ "" where the benchmark has the flag."""
    return "" if here.install.bench_help.has(name) else f"this llama-bench has no {name}"


def _cuda_key(here: Here) -> str:
    return "it acts on a GPU only" if not here.cuda else _flag(here, "-cuda")


def _variable(here: Here, name: str) -> str:
    if not here.cuda:
        return "it acts on a GPU only"
    return "" if here.install.reads_variable(name) else f"no file of this build names {name}"


def refusal(name: str, here: Here) -> str:
    """Why a setting is not searched; "" where it is."""
    moe = int(here.model.get("experts") or 0) > 0
    if name in ("threads", "threads_batch"):
        return "with a GPU it is left alone" if here.cuda else _flag(here, "-t")
    if name == "ubatch":
        return _flag(here, "-ub")
    if name == "flash_attention":
        return _flag(here, "-fa")
    if name in ("kv_type_k", "kv_type_v"):
        return "K and V have to change together; it stays as the command line has it"
    if name == "cuda_graphs":
        least = 8.0 if here.ik else 7.0
        if here.cuda and here.capability < least:
            return f"{here.install.engine} has CUDA graphs from compute capability {least} on"
        return _cuda_key(here) if here.ik else _variable(here, "GGML_CUDA_DISABLE_GRAPHS")
    if name == "graph_concurrency":
        if here.ik:
            return "ik_llama.cpp does not have it"
        return refusal("cuda_graphs", here) or _variable(here, "GGML_CUDA_GRAPH_OPT")
    if name == "fusion":
        return _cuda_key(here) if here.ik else _variable(here, "GGML_CUDA_DISABLE_FUSION")
    if name == "offload_min_tokens":
        if not here.host_weights:
            return "no weights are in host memory"
        return _cuda_key(here) if here.ik else _variable(here, "GGML_OP_OFFLOAD_MIN_BATCH")
    if not here.ik:
        return "llama.cpp does not have it" if name in SEARCHED else "not searched with llama.cpp"
    if name == "fused_moe":
        return _flag(here, "-fmoe") if moe else "the model has no experts"
    if name == "mmq_id_size":
        return _cuda_key(here) if moe else "the model has no experts"
    if name in ("mla_mode", "attention_max_batch_mib"):
        if here.model.get("architecture") != "deepseek2":
            return "the model has no latent attention"
        return _flag(here, "-mla" if name == "mla_mode" else "-amb")
    if name == "cpu_repack":
        return "with a GPU it also moves weights to the host" if here.cuda else _flag(here, "-rtr")
    return "not searched with ik_llama.cpp"


def refusals(here: Here) -> dict[str, str]:
    """Every setting of the engine that is not searched here, with the reason."""
    names = [s.name for s in settings_for(None, here.install.engine)]
    found = {n: refusal(n, here) for n in names}
    for name in found:
        if name.startswith("op_offload."):
            found[name] = "llama-bench has no -op, so it can't be measured"
        elif name in ("placement", "cpu_moe_layers", "split_mode", "ctx", "sequences"):
            found[name] = "it stays as the command line has it"
        elif name == "batch":
            found[name] = "it follows ubatch: one sequence uses no more"
    return {n: why for n, why in found.items() if why}


def defaults(here: Here, cores: int) -> dict[str, Value]:
    """What the engine runs without any of it, by the help of this binary where that says it."""
    common = here.install.common
    fmoe = common is None or not common[1].has("-fmoe") or common[1].has("-no-fmoe")
    values: dict[str, Value] = {
        "ubatch": _int_default(here.install.bench_help, "-ub", 512),
        "threads": cores, "threads_batch": cores,
        "flash_attention": _fa_default(here), "cuda_graphs": True, "graph_concurrency": False,
        "fusion": True, "fused_moe": fmoe, "mmq_id_size": 32, "offload_min_tokens": 32, "mla_mode": "auto",
        "attention_max_batch_mib": 256, "cpu_repack": False,
    }  # fmt: skip
    return {n: v for n, v in values.items() if not refusal(n, here)}


def _int_default(help_: Help, name: str, otherwise: int) -> int:
    flag = help_.get(name)
    return int(flag.default) if flag is not None and flag.default.isdigit() else otherwise


def _fa_default(here: Here) -> bool:
    """Of what serves, not of the benchmark: the two have differed."""
    helps = [here.install.common[1]] if here.install.common else []
    for help_ in (*helps, here.install.bench_help):
        flag = help_.get("-fa", "--flash-attn")
        if flag is not None and flag.default:
            return flag.default.lower() in ("1", "on", "auto", "enabled", "true")
    return here.ik


def make_knobs(
    found: Mapping[str, Value], model: Mapping[str, Any], workload: Workload, cores: int,
    *, approx: bool, exact_only: bool, held: Sequence[str] = (),
) -> tuple[Knob, ...]:  # fmt: skip
    """The knobs of a search, from what the target has described.

    Args:
        found: defaults of the settings that are not refused.
        exact_only: leave out what may change rounding, because answers can't be compared.
    """
    longest = max(workload.pp, workload.depth, 64)
    steps = sorted({n for p in range(10) for n in (1 << p, 3 << p) if n <= cores} | {cores})
    experts = max(1, int(model.get("experts") or 1))
    values: dict[str, Sequence[Value]] = {
        "ubatch": [u for u in _UBATCHES if u < 2 * longest], "threads": steps, "threads_batch": steps,
        "mmq_id_size": sorted({0, 32, -(-longest // experts)}),
        "offload_min_tokens": [0, *_UBATCHES[:7], 1 << 24],
        "mla_mode": tuple(_MLA), "attention_max_batch_mib": [128, 256, 512, 1024, 2048],
    }  # fmt: skip
    used = max(1, int(model.get("experts_used") or 1))

    def tokens(settings: Settings) -> int:
        return min(int(settings.get("ubatch", longest)), longest)

    codes: dict[str, Callable[[Value, Settings], Hashable]] = {
        "ubatch": lambda v, s: min(int(v), longest),
        "mmq_id_size": lambda v, s: tokens(s) <= int(v) * experts,
        # Weights are sent to the GPU from so many tokens on; ik_llama.cpp scales it for the experts.
        "offload_min_tokens": lambda v, s: (tokens(s) < int(v), tokens(s) * used < int(v) * experts),
    }
    knobs: list[Knob] = []
    for name, default in found.items():
        row = SETTINGS[name]
        if name in held or (row.fidelity == "approx" and not approx):
            continue
        if exact_only and row.fidelity != "exact":
            continue
        if (name == "threads" and not workload.tg) or (
            name in ("ubatch", "threads_batch") and workload.pp < 2
        ):
            continue
        choices = list(values.get(name, [False, True]))
        if default not in choices:
            choices.append(default)
            if isinstance(default, int):
                choices.sort(key=int)
        if len(choices) > 1:
            knobs.append(
                Knob(
                    name, tuple(choices), default, Kind(row.kind),
                    frozenset(m for m in row.moves if m != "memory") or frozenset({"pp", "tg"}),
                    Fidelity(row.fidelity), row.type == "int", codes.get(name),
                    "ubatch" if name in ("mmq_id_size", "offload_min_tokens") else None,
                )
            )  # fmt: skip
    return tuple(knobs)


def spell(
    settings: Settings, engine: str, help_: Help, *, bench: bool, batch: int = 2048, metric: str | None = None
) -> Spelled:
    """Args:
        help_: of the tool that is started.
        bench: whether that is llama-bench, whose spelling differs.
        batch: the logical batch; raised to the u-batch, which it bounds.
        metric: of a run of llama-bench, which has one number of threads: that of this metric.

    Raises:
        ValueError: a setting that this tool has no way to be told; the message names it.
    """
    out = Spelled()
    ik = engine == "ik_llama.cpp"
    for name, value in settings.items():
        text = str(value)
        if name == "ubatch":
            out.args += ["-ub", text]
            if int(value) > batch or bench:
                out.args += ["-b", str(max(batch, int(value)))]
        elif name in ("threads", "threads_batch"):
            if not bench:
                out.args += ["-t" if name == "threads" else "-tb", text]
            elif metric is None or (name == "threads_batch") == (metric == "pp"):
                out.args += ["-t", text]
        elif name == "flash_attention":
            out.args += _fa(bool(value), help_, bench=bench)
        elif name == "fused_moe" and ik:
            out.args += _fmoe(bool(value), help_, bench=bench)
        elif name == "mla_mode" and ik:
            out.args += [_need(help_, name, "-mla"), _MLA[text]]
        elif name == "attention_max_batch_mib" and ik:
            out.args += [_need(help_, name, "-amb"), text]
        elif name == "cpu_repack" and ik:
            repack = [_need(help_, name, "-rtr")]
            out.args += [*repack, str(int(bool(value)))] if bench else repack if value else []
        elif ik and name in _CUDA_KEYS:
            _need(help_, name, "-cuda")
            out.cuda[_CUDA_KEYS[name]] = str(int(value))
        elif not ik and name in _VARIABLES:
            variable, on, off = _VARIABLES[name]
            out.env[variable] = text if name == "offload_min_tokens" else on if value else off
        else:
            raise ValueError(f"{name} has no spelling in {engine}")
    return out


_CUDA_KEYS = {
    "cuda_graphs": "graphs", "fusion": "fusion", "mmq_id_size": "mmq-id-size",
    "offload_min_tokens": "offload-batch-size",
}  # fmt: skip
# Variable, its value for true, its value for false. The first is tested by presence, so off is absence.
_VARIABLES: dict[str, tuple[str, str | None, str | None]] = {
    "cuda_graphs": ("GGML_CUDA_DISABLE_GRAPHS", None, "1"),
    "graph_concurrency": ("GGML_CUDA_GRAPH_OPT", "1", None),
    "fusion": ("GGML_CUDA_DISABLE_FUSION", None, "1"),
    "offload_min_tokens": ("GGML_OP_OFFLOAD_MIN_BATCH", None, None),
}


def _need(help_: Help, setting: str, *names: str) -> str:
    flag = help_.get(*names)
    if flag is None:
        raise ValueError(f"{setting}: this binary has no {' or '.join(names)}")
    return next(n for n in names if n in flag.names)


def _fa(on: bool, help_: Help, *, bench: bool) -> list[str]:
    """Three spellings: a switch (before autumn 2025), 0|1, and on|off|auto."""
    name = _need(help_, "flash_attention", "-fa", "--flash-attn")
    flag = help_.flags[name]
    if not flag.argument and not bench:
        return [name] if on else []
    if "on" in flag.choices or (not bench and "on" in flag.argument):
        return [name, "on" if on else "off"]
    return [name, "1" if on else "0"]


def _fmoe(on: bool, help_: Help, *, bench: bool) -> list[str]:
    """llama-bench takes 0|1. The common tools have had a switch that turns it on, later one that turns it
    off."""
    if bench:
        return [_need(help_, "fused_moe", "-fmoe"), str(int(on))]
    if help_.has("-no-fmoe"):
        return [] if on else ["-no-fmoe"]
    return [_need(help_, "fused_moe", "-fmoe")] if on else []
