"""The search space of llama.cpp and ik_llama.cpp: the values of each knob and the illegal combinations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno.settings import SETTINGS

from ...space.knobs import Fidelity, Kind, Knob
from .server import DRAFT
from .spelling import MLA

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ...core.protocol import Settings, Value, Workload

_UBATCHES = tuple(1 << p for p in range(6, 14))
_PLAIN = ("f16", "bf16", "f32")
_KV_TYPES = {"llama.cpp": ("f16", "q8_0", "q5_1", "q4_0"), "ik_llama.cpp": ("f16", "q8_0", "q6_0", "q4_0")}
# Type pairs of K and V for which a default CUDA build has flash attention.
_FA_PAIRS = {("q8_0", "q6_0"), ("q6_0", "q5_0"), ("q8_0", "iq4_nl")}
# Common placement rules that put experts or parts of them in host memory.
_PLACEMENTS = ("", "ffn_down_exps=cpu", "ffn_(up|gate)_exps=cpu", "exps=cpu")


def legal(engine: Mapping[str, Any], device: Mapping[str, Any]) -> Callable[[Settings], bool]:
    """The constraint of the space. It excludes points that do not run or can only be slower."""
    ik, cuda = engine["name"] == "ik_llama.cpp", device.get("kind") == "cuda"

    def allowed(settings: Settings) -> bool:
        held = {**engine["defaults"], **settings}
        flash = bool(held.get("flash_attention", True))
        pair = (str(held.get("kv_type_k", "f16")), str(held.get("kv_type_v", "f16")))
        if pair[1] not in _PLAIN and not flash:
            return False
        if cuda and flash and pair[0] != pair[1] and not (ik and pair in _FA_PAIRS):
            return False
        if held.get("placement") and held.get("n_cpu_moe"):
            return False
        plain = flash and pair[0] in _PLAIN and pair[1] in _PLAIN
        return held.get("split_mode") != "tensor" or plain

    return allowed


def make_knobs(
    engine: Mapping[str, Any], model: Mapping[str, Any], workload: Workload,
    *, approx: bool, held: Sequence[str] = (),
) -> tuple[Knob, ...]:  # fmt: skip
    """The knobs of a search, from the target's description. If answers cannot be compared, knobs that may
    change rounding are left out."""
    found: Mapping[str, Value] = engine["defaults"]
    exact_only = not engine["answers_compared"]
    longest = max(workload.pp, workload.depth, 64)
    values = _values(engine, model, longest)
    if workload.served is not None:
        most = workload.served.concurrency
        values["sequences"] = sorted({1 << p for p in range(11) if 1 << p < most} | {most})
        values["batch"] = [256, 512, 1024, 2048, 4096]
        # Text after random tokens does not show the value of drafts.
        drafted = workload.served.text is not None
        values["spec"] = ["off", "ngram"] if drafted else ["off"]
        values["spec_max"] = [4, 8, 16, 32, DRAFT] if drafted else [DRAFT]
    experts = max(1, int(model.get("experts") or 1))
    layers = int(model.get("layers") or 0)
    used = max(1, int(model.get("experts_used") or 1))

    def tokens(settings: Settings) -> int:
        return min(int(settings.get("ubatch", longest)), longest)

    codes: dict[str, Callable[[Value, Settings], Hashable]] = {
        "ubatch": lambda v, s: min(int(v), longest),
        "mmq_id_size": lambda v, s: tokens(s) <= int(v) * experts,
        # From this number of tokens on, weights are copied to the GPU; ik_llama.cpp scales it for experts.
        "offload_min_tokens": lambda v, s: (tokens(s) < int(v), tokens(s) * used < int(v) * experts),
        "n_cpu_moe": lambda v, s: min(int(v), layers),
        "spec_max": lambda v, s: int(v) if s.get("spec", "off") != "off" else "unused",
    }
    knobs: list[Knob] = []
    for name, default in found.items():
        row = SETTINGS[name]
        # In these engines CPU and GPU round differently, so placement changes the bits of a product.
        placed = name in ("placement", "n_cpu_moe", "split_mode")
        fidelity = Fidelity.ROUNDING if placed else Fidelity(row.fidelity)
        if name in (*held, *engine.get("fixed", ())) or (fidelity is Fidelity.APPROX and not approx):
            continue
        if exact_only and fidelity is not Fidelity.EXACT:
            continue
        if (name == "threads" and not workload.tg) or (
            name in ("ubatch", "threads_batch") and workload.pp < 2
        ):
            continue
        choices = list(values.get(name, [False, True]))
        own = (engine.get("incumbent") or {}).get(
            name, default
        )  # the value on the user's command line must race
        choices += [v for v in dict.fromkeys((default, own)) if v not in choices]
        if row.type == "int":
            choices.sort(key=int)
        moves = frozenset(m for m in row.moves if m != "memory") or frozenset({"pp", "tg"})
        if name.startswith("kv_type"):
            moves = frozenset({"pp", "tg"})  # flash attention has other kernels for them
        if workload.served is not None:
            moves = frozenset({"tg"})  # the time of a server includes prompts
        if len(choices) > 1:
            bounded = "ubatch" if name in ("mmq_id_size", "offload_min_tokens") else None
            knobs.append(
                Knob(
                    name, tuple(choices), default, Kind(row.kind), moves, fidelity, row.type == "int",
                    codes.get(name), bounded,
                )
            )  # fmt: skip
    return tuple(knobs)


def _values(engine: Mapping[str, Any], model: Mapping[str, Any], longest: int) -> dict[str, Sequence[Value]]:
    cores, layers = int(engine["cores"]), int(model.get("layers") or 0)
    steps = sorted({n for p in range(10) for n in (1 << p, 3 << p) if n <= cores} | {cores})
    experts = max(1, int(model.get("experts") or 1))
    types = _KV_TYPES[engine["name"]]
    # ik_llama.cpp multiplies the threshold for experts. Below 2, single tokens would copy weights, too, but
    # only prompts decide between these values.
    shared = experts // max(1, int(model.get("experts_used") or 1))
    ratio = max(1, shared) if engine["name"] == "ik_llama.cpp" else 1
    offloads = sorted({max(2, min(u, longest) // ratio) for u in _UBATCHES[:7]})
    return {
        "ubatch": [u for u in _UBATCHES if u < 2 * longest], "threads": steps, "threads_batch": steps,
        "mmq_id_size": sorted({0, 32, -(-longest // experts)}),
        "offload_min_tokens": [*offloads, 1 << 24],
        "mla_mode": tuple(MLA), "attention_max_batch_mib": [128, 256, 512, 1024, 2048],
        "kv_type_k": types, "kv_type_v": types, "placement": _PLACEMENTS,
        "n_cpu_moe": sorted({layers * eighth // 8 for eighth in range(9)}),
        "split_mode": engine["split_modes"],
    }  # fmt: skip
