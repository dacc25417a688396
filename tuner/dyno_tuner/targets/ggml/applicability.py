"""The settings of llama.cpp and ik_llama.cpp that are searched, their defaults, and the reasons for leaving
others out.

A setting is refused, with a reason, if this binary has no flag for it or if it cannot matter on this machine.
No flag is passed without proof that the binary has it. `spelling` writes the flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno.settings import settings_for

from ...core.errors import TargetUnusable
from .spelling import OP_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...core.protocol import Value
    from .installation import Installation

_FITS = 0.8  # a file below this share of GPU memory leaves room for cache and buffers


@dataclass(frozen=True)
class Here:
    """Facts about the binary, the machine and the model that decide whether a setting is searched."""

    install: Installation
    device: Mapping[str, Any]
    model: Mapping[str, Any]
    host_weights: bool  # some weights stay in host memory beside a GPU
    gpus: int = 1
    base: Mapping[str, Value] = field(
        default_factory=dict
    )  # settings for placement and cache from the command line
    carried: frozenset[str] = frozenset()  # flags of the command line that every run keeps
    op_ids: Mapping[str, int] | str = ""  # op ids by name, or the reason why they are unknown

    @property
    def ik(self) -> bool:
        return self.install.engine == "ik_llama.cpp"

    @property
    def cuda(self) -> bool:
        return self.device.get("kind") == "cuda"

    @property
    def capability(self) -> float:
        return float(self.device.get("compute_capability") or 0)

    @property
    def experts(self) -> bool:
        return int(self.model.get("experts") or 0) > 0

    @property
    def fits(self) -> bool:
        room = float(self.device.get("memory_mib") or 0) * self.gpus * 2**20
        return float(self.model["file_bytes"]) < _FITS * room


def _flag(here: Here, *names: str) -> str:
    """The reason for a refusal; "" if the benchmark has one of the flags."""
    return "" if here.install.bench_help.has(*names) else f"this llama-bench has no {' or '.join(names)}"


def _cuda_key(here: Here) -> str:
    return "it acts on a GPU only" if not here.cuda else _flag(here, "-cuda")


def _variable(here: Here, name: str) -> str:
    if not here.cuda:
        return "it acts on a GPU only"
    return "" if here.install.reads_variable(name) else f"no file of this build names {name}"


def refusal(name: str, here: Here) -> str:
    """The reason why a setting is not searched; "" if it is."""
    family, _, op = name.partition(".")
    rule = _RULES.get(family)
    if rule is None:
        return f"not searched with {here.install.engine}"
    return rule(here, op)


def _threads(here: Here, _: str) -> str:
    if here.cuda and not here.host_weights:
        return "all weights are on the GPU, so it has no effect"
    return _flag(here, "-t")


def _graphs(here: Here, _: str) -> str:
    least = 8.0 if here.ik else 7.0
    if here.cuda and here.capability < least:
        return f"{here.install.engine} has CUDA graphs from compute capability {least} on"
    return _cuda_key(here) if here.ik else _variable(here, "GGML_CUDA_DISABLE_GRAPHS")


def _concurrency(here: Here, _: str) -> str:
    if here.ik:
        return "ik_llama.cpp does not have it"
    return _graphs(here, "") or _variable(here, "GGML_CUDA_GRAPH_OPT")


def _fusion(here: Here, _: str) -> str:
    return _cuda_key(here) if here.ik else _variable(here, "GGML_CUDA_DISABLE_FUSION")


def _offload(here: Here, _: str) -> str:
    if not here.host_weights:
        return "no weights are in main memory"
    return _cuda_key(here) if here.ik else _variable(here, "GGML_OP_OFFLOAD_MIN_BATCH")


def _policy(here: Here, op: str) -> str:
    if not here.ik:
        return "llama.cpp has no offload policy by op"
    if not here.cuda or not here.host_weights:
        return "no weights are in main memory" if here.cuda else "it acts on a GPU only"
    if op == "embed":
        return "rows of the embedding are never offloaded"
    if (op in ("matmul_id", "moe_up_gate")) != here.experts:
        return "the model has experts" if here.experts else "the model has no experts"
    if isinstance(here.op_ids, str):
        return here.op_ids
    known = OP_NAMES[op] in here.op_ids
    return "" if known else f"this binary has no op {OP_NAMES[op]}"


def _only_ik(here: Here) -> str:
    return "" if here.ik else "llama.cpp does not have it"


def _experts(here: Here, flag: str) -> str:
    missing = _only_ik(here)
    if missing or not here.experts:
        return missing or "the model has no experts"
    return _cuda_key(here) if flag == "-cuda" else _flag(here, flag)


def _latent(here: Here, flag: str) -> str:
    missing = _only_ik(here)
    if missing or not here.model.get("latent_cache"):
        return missing or "the model has no latent attention"
    if flag in here.carried:
        return f"the command line has {flag} 2, and no setting has that meaning"
    return _flag(here, flag)


def _repack(here: Here, _: str) -> str:
    if here.cuda and not here.host_weights:
        return "no weights are in main memory"
    return _flag(here, "-rtr" if here.ik else "--repack")


def _placement(here: Here, other: str, *flags: str) -> str:
    if not here.cuda:
        return "there is no GPU to place weights on"
    if not here.experts:
        return "the model has no experts; other weights stay where the command line has them"
    if other in here.base or "-ot" in here.carried:
        return "the command line places the experts in another way"
    if here.fits and not here.host_weights:
        return "the model fits into the GPU's memory"
    return _flag(here, *flags)


def _split(here: Here, _: str) -> str:
    return _flag(here, "-sm") if here.gpus > 1 else "changes nothing with one GPU"


_RULES: dict[str, Callable[[Here, str], str]] = {
    "ubatch": lambda h, _: _flag(h, "-ub"),
    "threads": _threads,
    "threads_batch": _threads,
    "flash_attention": lambda h, _: _flag(h, "-fa"),
    "kv_type_k": lambda h, _: _flag(h, "-ctk"),
    "kv_type_v": lambda h, _: _flag(h, "-ctv"),
    "cuda_graphs": _graphs,
    "graph_concurrency": _concurrency,
    "fusion": _fusion,
    "offload_min_tokens": _offload,
    "op_offload": _policy,
    "fused_moe": lambda h, _: _experts(h, "-fmoe"),
    "mmq_id_size": lambda h, _: _experts(h, "-cuda"),
    "mla_mode": lambda h, _: _latent(h, "-mla"),
    "attention_max_batch_mib": lambda h, _: _latent(h, "-amb"),
    "cpu_repack": _repack,
    "placement": lambda h, _: _placement(h, "n_cpu_moe", "-ot"),
    "n_cpu_moe": lambda h, _: _placement(h, "placement", "-ncmoe", "--n-cpu-moe", "-ot"),
    "split_mode": _split,
    "ctx": lambda h, _: "it stays as the command line has it",
    "sequences": lambda h, _: "it stays as the command line has it",
    "kv_unified": lambda h, _: "it changes nothing with one sequence",
    "spec": lambda h, _: "llama-bench does not draft; --workload serve with a text searches it",
    "spec_max": lambda h, _: "llama-bench does not draft; --workload serve with a text searches it",
    "batch": lambda h, _: "it follows ubatch, because one sequence does not use more",
}


def refusals(here: Here) -> dict[str, str]:
    """Each setting of the engine that is not searched, with the reason."""
    found = {s.name: refusal(s.name, here) for s in settings_for(None, here.install.engine)}
    return {n: why for n, why in found.items() if why}


def find_op_ids(install: Installation, model: str, *, wanted: bool) -> Mapping[str, int] | str:
    """The op ids for `-op`, or the reason why there are none. Of the benchmarks, only llama-sweep-bench takes
    `-op`."""
    if not wanted:
        return "no weights are in main memory"
    flags = install.help_of("llama-sweep-bench")
    if flags is None or not flags.has("-op"):
        return "llama-bench has no -op, and no llama-sweep-bench is here"
    try:
        return install.op_ids(model)
    except TargetUnusable as error:
        return str(error)


def named_policy(policy: Mapping[int, bool], ids: Mapping[str, int]) -> dict[str, Value]:
    """The user's own `-op` as settings. Its numbers are read with the op ids of this binary. Raises
    TargetUnusable for a number that is no product with weights."""
    names = {number: name for name, number in ids.items()}
    families = {name: family for family, name in OP_NAMES.items()}
    found: dict[str, Value] = {}
    for number, on in policy.items():
        name = names.get(number, "no op")
        if name not in families:
            raise TargetUnusable(
                f"the command line's -op {number} is {name} in this binary, which multiplies no weights: "
                "the numbers belong to another version; write the policy for this one"
            )
        found[f"op_offload.{families[name]}"] = on
    return found


def defaults(here: Here, cores: int) -> dict[str, Value]:
    """The settings before a search. They are the engine's defaults, taken from the help of this binary where
    it lists them. Placement and cache come from the command line."""
    common, ubatch = here.install.common, here.install.bench_help.get("-ub")
    fmoe = common is None or not common[1].has("-fmoe") or common[1].has("-no-fmoe")
    values: dict[str, Value] = {
        "ubatch": int(ubatch.default) if ubatch is not None and ubatch.default.isdigit() else 512,
        "threads": cores, "threads_batch": cores,
        "flash_attention": _fa_default(here), "kv_type_k": "f16", "kv_type_v": "f16",
        "cuda_graphs": True, "graph_concurrency": False,
        "fusion": True, "fused_moe": fmoe, "mmq_id_size": 32, "offload_min_tokens": 32, "mla_mode": "auto",
        "attention_max_batch_mib": 256, "cpu_repack": not here.ik,
        "placement": "", "n_cpu_moe": 0, "split_mode": "layer",
        **{f"op_offload.{op}": True for op in OP_NAMES},
    }  # fmt: skip
    return {n: here.base.get(n, v) for n, v in values.items() if not refusal(n, here)}


def _fa_default(here: Here) -> bool:
    """The default of flash attention in the server. The default of the benchmark can differ."""
    helps = [here.install.common[1]] if here.install.common else []
    for help_ in (*helps, here.install.bench_help):
        flag = help_.get("-fa", "--flash-attn")
        if flag is not None and flag.default:
            return flag.default.lower() in ("1", "on", "auto", "enabled", "true")
    return here.ik


def split_modes(install: Installation) -> list[str]:
    """The split modes that this llama-bench lists, except those that use one GPU only."""
    flag = install.bench_help.get("-sm")
    return [m for m in (flag.choices if flag else ()) if m not in ("none", "attn")] or ["layer"]
