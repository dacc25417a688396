"""Rules for combinations of tokens, and for tokens and the model. `gpu_rules.py` has the rules for GPUs.

A rule applies only if the line and the facts show its premise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .drafts import draft_rules
from .gpu_rules import architectures, gpu_limits, single_gpu
from .line import IK, IK_SOURCE, MAIN, MAIN_SOURCE, Item, Line, Status, _is_int, inert, is_on
from .op_ids import EXPERT_MATMULS
from .overrides import override_rules
from .placement import placement

if TYPE_CHECKING:
    from collections.abc import Callable

OFFLOAD_SOURCE = f"{IK_SOURCE}, ggml-cuda.cu:5180-5207"


def defaults(line: Line) -> None:
    item = line.last("cmake", "GGML_SCHED_MAX_COPIES")
    if item is not None and item.value == ("1" if line.engine == IK else "4") and not item.wrong:
        item.say(Status.INERT, f"{item.value} is the default")


def batch_sizes(line: Line) -> None:
    batch, micro, ctx = line.numbers("-b", 2048), line.numbers("-ub", 512), line.numbers("-c")
    ub_item, b_item = line.flag("-ub"), line.flag("-b")
    if ub_item is not None and batch and micro and max(micro) > max(batch):
        ub_item.say(Status.INVALID, f"u-batch {max(micro)} is cut to the batch of {max(batch)}"
                    f"{'' if b_item else ' (default)'}; give -b {max(micro)} too")  # fmt: skip
    if ctx and ctx[0] > 0:
        for item, sizes in ((b_item, batch), (ub_item, micro)):
            if item is not None and sizes and max(sizes) > ctx[0]:
                item.say(Status.INVALID, f"{max(sizes)} is cut to the context of {ctx[0]}")
    for item, sizes in ((b_item, batch), (ub_item, micro)):
        if item is not None and any(s < 1 for s in sizes):
            item.say(Status.INVALID, f"{min(sizes)} tokens are not a batch; give 1 or more")


def slots(line: Line) -> None:
    """The share of the context of each slot, and numbers of slots that a server does not accept."""
    item, counts, ctx = line.flag("-np"), line.numbers("-np"), line.numbers("-c")
    if item is None or item.flag is None or not counts:
        return
    automatic = line.engine == MAIN and counts[0] < 0
    if counts[0] < 1 and not automatic:
        item.say(Status.INVALID, f"{counts[0]} slots cannot serve a request; give 1 or more")
    elif counts[0] > 1 and ctx and ctx[0] > 0 and line.flag("-kvu") is None:
        item.say(
            Status.DOES,
            f"each of {counts[0]} slots has {ctx[0] // counts[0]} of the {ctx[0]} tokens of the context; for "
            f"{ctx[0]} tokens in each give -c {ctx[0] * counts[0]}",
        )
    if counts[0] == 1:
        for batching in line.flags("-cb", "-nocb"):
            batching.say(Status.INERT, "there is nothing to batch with one slot")


def micro_batches(line: Line) -> list[int]:
    """The actual u-batches: limited by the batch, which is limited by the context; empty if they cannot be
    read."""
    batch, micro, ctx = line.numbers("-b", 2048), line.numbers("-ub", 512), line.numbers("-c")
    if not batch or not micro:
        return []
    most = min(max(batch), ctx[0]) if ctx and ctx[0] > 0 else max(batch)
    return [min(m, most) for m in micro]


QUANT_KV = frozenset({"q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "q6_0", "q8_KV"})
FA_PAIRS = {
    IK: {("q4_0", "q4_0"), ("q8_0", "q8_0"), ("f16", "f16"), ("q8_0", "iq4_nl"), ("iq4_nl", "iq4_nl"),
         ("q6_0", "q5_0"), ("q8_0", "q6_0")},
    MAIN: {("q4_0", "q4_0"), ("q8_0", "q8_0"), ("f16", "f16"), ("bf16", "bf16")},
}  # fmt: skip


def _fa_off(line: Line) -> bool:
    item, switch = line.flag("-fa"), line.flag("-no-fa")
    return (item is not None and item.value in ("off", "0", "false", "disabled")) or (
        switch is not None and switch.flag is not None
    )


def cache_types(line: Line) -> None:
    k_item, v_item = line.flag("-ctk"), line.flag("-ctv")
    if _fa_off(line):
        for item in (v_item, line.flag("-ctv-first"), line.flag("-ctv-last")):
            if item is not None and (item.value or "").partition(",")[0] in QUANT_KV:
                why = "a quantized V cache needs flash attention, which this line turns off"
                item.say(Status.INVALID, why)
        return
    for item in (k_item, v_item):
        if line.engine == MAIN and item is not None and item.value == "iq4_nl":
            source = f"{MAIN_SOURCE}, cuda/fattn.cu:525-539"
            item.say(Status.INVALID, "the CUDA flash attention of llama.cpp does not support iq4_nl", source)
    pair = ((k_item.value if k_item else None) or "f16", (v_item.value if v_item else None) or "f16")
    if (k_item or v_item) and "," not in "".join(pair) and pair not in FA_PAIRS[line.engine]:
        status, text = _uncompiled(line.engine, pair)
        for item in (k_item, v_item):
            if item is not None and not item.wrong:
                item.say(status, text)


def _uncompiled(engine: str, pair: tuple[str, str]) -> tuple[Status, str]:
    """The effect of a pair of cache types for which a standard build has no flash attention kernel."""
    which = f"flash attention on CUDA for K {pair[0]} with V {pair[1]}"
    if engine == MAIN and "f32" in pair:
        return Status.DOES, (
            f"{which} converts the cache to f16, which is slower: no build has kernels for f32"
        )
    build = (
        "GGML_CUDA_FA_ALL_QUANTS=ON"
        if engine == IK
        else "GGML_CUDA_FA_QUANTS; without it, the cache is converted to f16"
    )
    return Status.NEEDS, f"{which} needs a build with {build}"


# llama-model.h:593 and llama.cpp:3895-3926 of ik_llama.cpp, by the names in model files.
LATENT = frozenset({"deepseek2", "glm-dsa", "mistral4", "bailingmoe3"})
GRAPH_SPLIT = LATENT - {"bailingmoe3"} | {
    "llama", "qwen3moe", "glm4moe", "mistral3", "command-r", "cohere2", "cohere2_moe", "mimo2", "qwen3",
    "qwen3vl", "hunyuan-moe", "gpt-oss", "ernie4_5-moe", "minimax-m2", "minimax-m3", "seed_oss", "step35",
    "laguna", "qwen35", "qwen35moe", "gemma4", "gemma4_mtp", "gemma4-assistant", "mellum", "muse-glimmer",
}  # fmt: skip
GROUPED = frozenset({"bailingmoe2", "bailingmoe3"})


def _graph_split(line: Line) -> bool:
    """Whether the line requests a graph split, and no known fact about GPUs or model prevents it."""
    item, arch = line.flag("-sm"), line.facts.architecture
    asked = set((item.value or "").split(",")) if item is not None else set()
    possible = line.facts.gpus != 1 and (arch is None or arch in GRAPH_SPLIT)
    return line.engine == IK and bool(asked & {"graph", "attn"}) and possible


def latent_attention(line: Line) -> None:
    arch, mla, amb = line.facts.architecture, line.flag("-mla"), line.flag("-amb")
    if line.engine != IK:
        return
    other = arch is not None and arch not in LATENT
    if mla is not None and other:
        mla.say(Status.INERT, f"forced to 0: {arch} has no latent attention")
    elif mla is not None:
        _partial_offload(line, mla)
    absorbed = mla is not None and mla.value in ("0", "1") and not mla.wrong
    if amb is not None and (absorbed or other) and not _fa_off(line):
        amb.say(Status.INERT, "matters only for prompts of latent attention with -mla 2 or 3, or without "
                "flash attention")  # fmt: skip
    low = [n for n in line.numbers("-amb") if 0 < n < 128]
    if amb is not None and low and not line.bench:
        amb.say(Status.INVALID, f"{low[0]} is raised to 128", f"{IK_SOURCE}, common.cpp:1964")
    split = line.flag("-sm")
    if split is None or not _graph_split(line) or other:
        return
    if mla is not None and mla.value == "0":
        mla.say(Status.INVALID, "a graph split of a latent-attention model stops with -mla 0")
    if _fa_off(line) and (arch is not None or mla is not None):
        split.say(Status.INVALID, "a graph split of a latent-attention model stops without flash attention")


def _partial_offload(line: Line, mla: Item) -> None:
    layers, on_gpu = line.facts.layers, line.numbers("-ngl")
    if not layers or not on_gpu or mla.value == "3" or not all(0 < n < layers for n in on_gpu):
        return
    why = f"forced to 3, because only {max(on_gpu)} of {layers} layers are on the GPU"
    mla.say(Status.INVALID, why, f"{IK_SOURCE}, src/llama.cpp:8215-8225")


def split_modes(line: Line) -> None:
    split, arch = line.flag("-sm"), line.facts.architecture
    _graph_only(line)
    if split is None:
        return
    on = line.cuda("graphs")
    cannot = arch is not None and arch not in GRAPH_SPLIT
    if line.engine == IK and split.value in ("graph", "attn") and cannot:
        source = f"{IK_SOURCE}, src/llama.cpp:3895-3926"
        split.say(Status.INVALID, f"{arch} does not support this split mode; layer is used instead", source)
    if split.value == "graph" and _graph_split(line) and on is not None and on.value == "1":
        on.say(Status.INERT, "a graph split runs without CUDA graphs")
    if line.engine == MAIN and split.value == "row":
        split.say(Status.DOES, "row is deprecated")
    if line.engine == MAIN and split.value == "tensor":
        if arch == "deepseek2":
            split.say(Status.INVALID, f"split mode tensor does not support {arch}")
        if _fa_off(line):
            split.say(Status.INVALID, "split mode tensor needs flash attention, which this line turns off")
        for item in (line.flag("-ctk"), line.flag("-ctv")):
            if item is not None and item.value in QUANT_KV:
                item.say(Status.INVALID, "split mode tensor needs an unquantized KV cache")


def _graph_only(line: Line) -> None:
    """Rules for flags that matter only in a graph split."""
    if line.engine != IK or line.facts.gpus == 1:
        return
    if not _graph_split(line):
        only = line.flags("-smgs", "-sas", "-grt", "--max-gpu")
        inert(only, "has an effect only with a graph split, which this line does not have")
    reduction = line.flag("-grt")
    if reduction is not None and reduction.value == "f16" and line.facts.architecture == "gpt-oss":
        source = f"{IK_SOURCE}, src/llama.cpp:8226-8233"
        reduction.say(Status.INVALID, "gpt-oss uses f32 instead", source)


def graphs(line: Line) -> None:
    opt, off = line.last("env", "GGML_CUDA_GRAPH_OPT"), line.last("env", "GGML_CUDA_DISABLE_GRAPHS")
    if opt is not None and line.engine == MAIN:
        if opt.value != "1":
            opt.say(Status.INERT, "only the value 1 turns it on")
        elif line.facts.architecture in ("deepseek2", "bailingmoe2"):
            norm = "has no attention norm whose result goes into three products"
            opt.say(Status.INERT, f"{line.facts.architecture} {norm}")
        elif off is not None:
            opt.say(Status.INERT, "it needs CUDA graphs, which GGML_CUDA_DISABLE_GRAPHS turns off")
        elif (built := line.last("cmake", "GGML_CUDA_GRAPHS")) is not None and not is_on(built.value):
            opt.say(Status.INERT, "it needs CUDA graphs, which this build leaves out")
    on = line.cuda("graphs")
    if on is not None and on.value == "1" and off is not None:
        on.say(Status.INERT, "GGML_CUDA_DISABLE_GRAPHS turns them off")
    fused, bench = line.flag("-no-fmoe"), line.flag("-fmoe")
    unfused = fused or (bench if bench is not None and bench.value == "0" else None)
    if on is not None and on.value == "1" and unfused is not None and line.facts.moe is not False:
        on.say(Status.INERT, f"generation with experts has no CUDA graphs under {unfused.text}")
    built = line.last("cmake", "GGML_CUDA_USE_GRAPHS")
    if on is not None and built is not None and not is_on(built.value):
        on.say(Status.INVALID, "this build has no CUDA graphs, so the key is unknown")


def _host_flags(line: Line) -> list[Item]:
    flags = line.flags("-ot", "-cmoe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--fit", "-fit")
    return [item for item in flags if item.value not in ("0", "off", "false", "disabled")]


def all_on_gpu(line: Line) -> bool:
    """Whether the line surely puts all weights on the GPU."""
    layers, number, item = line.facts.layers, line.numbers("-ngl"), line.flag("-ngl")
    everything = (item is not None and item.value == "all") or bool(
        number and (min(number) >= 999 or (layers is not None and min(number) > layers))
    )
    return everything and not _host_flags(line)


def _all_off(line: Line) -> Item | None:
    """The token by which ops with weights in host memory stay on the CPU."""
    if line.engine == MAIN:
        switch, value = line.flag("--no-op-offload"), line.flag("-nopo")
        if switch is not None:
            return switch
        return value if value is not None and value.flag is not None and value.value == "1" else None
    found: Item | None = None
    for item in line.all("flag", "-op"):
        for pair in item.ops:
            if pair["offload"]:
                found = None
            elif pair["op"] == "all ops":
                found = item
    return found


def offload(line: Line) -> None:
    switches = line.flags("-op", "-no-ooae", "-nopo", "--no-op-offload")
    sizes = [i for n in ("offload-batch-size", "offload-batch-size-per-byte") for i in line.all("cuda", n)]
    sizes += line.all("env", "GGML_OP_OFFLOAD_MIN_BATCH")
    if all_on_gpu(line):
        inert(
            [*switches, *sizes, *line.flags("-rtr")],
            "only for weights in host memory, and this line puts all of them on the GPU",
        )
        return
    off = _all_off(line)
    if off is not None:
        inert([*sizes, *line.flags("-no-ooae")], f"{off.text} leaves nothing to upload")
    policies = line.flags("-op")
    if all(i.ops and not i.wrong and all(p["offload"] for p in i.ops) for i in policies):
        for item in policies:
            item.say(Status.INERT, "1 is the default of every op", OFFLOAD_SOURCE)
    _thresholds(line, switches, sizes)


def _thresholds(line: Line, switches: list[Item], sizes: list[Item]) -> None:
    """Report flags without effect because the u-batch has fewer tokens than an upload of weights, or of
    experts, needs."""
    micro, per_byte = micro_batches(line), line.cuda("offload-batch-size-per-byte")
    if not micro or per_byte is not None or any(i.wrong or not _is_int(i.value or "") for i in sizes):
        return
    least = int(sizes[-1].value or 0) if sizes else 32
    source = OFFLOAD_SOURCE if line.engine == IK else f"{MAIN_SOURCE}, cuda/ggml-cuda.cu:5637-5655"
    for items, from_size in ((switches, least), (sizes, min(least, 32))):
        if max(micro) < from_size:
            why = f"weights are uploaded from {from_size} tokens on, and the u-batch is {max(micro)}"
            inert(items, why, source)
    experts, used = line.facts.experts, line.facts.experts_used
    if line.engine != IK or not experts or not used or max(micro) < least:
        return
    threshold = -(-least * experts // used)
    if max(micro) >= threshold:
        return
    text = (
        f"experts stay on the CPU below {threshold} tokens ({least} x {experts} experts / {used} used) and "
        f"the u-batch is {max(micro)}"
    )
    for item in switches:
        if item.name == "-no-ooae":
            item.say(Status.INERT, text, OFFLOAD_SOURCE)
        _no_expert_ops(item, text)


def _no_expert_ops(item: Item, why: str) -> None:
    """Note the effect of an `-op` list if its ops of experts have none."""
    names = {p["op"] for p in item.ops}
    if names and names <= EXPERT_MATMULS:
        item.say(Status.INERT, why, OFFLOAD_SOURCE)
    elif names & EXPERT_MATMULS:
        item.say(Status.DOES, f"for the expert ops it changes nothing: {why}", OFFLOAD_SOURCE)


_OF_EXPERTS = (
    ("cuda", "mmq-id-size"), ("flag", "-cmoe"), ("flag", "-ncmoe"), ("flag", "--n-cpu-moe"),
    ("flag", "-no-fmoe"), ("flag", "-fmoe"), ("flag", "-no-ooae"), ("flag", "-ger"), ("flag", "-muge"),
    ("flag", "-no-mmad"), ("flag", "--defer-experts"), ("flag", "--prefetch-experts"),
)  # fmt: skip


def expert_kernels(line: Line) -> None:
    if line.facts.moe is False:
        inert((i for kind, name in _OF_EXPERTS for i in line.all(kind, name)), "the model has no experts")
        for item in line.flags("-op"):
            _no_expert_ops(item, "the model has no experts")
        return
    arch = line.facts.architecture
    if arch is not None and arch not in GROUPED:
        source = f"{IK_SOURCE}, llama-build-context.cpp"
        inert(line.flags("-ger"), f"{arch} has no groups of experts", source)
    size = line.cuda("mmq-id-size")
    experts, micro = line.facts.experts, micro_batches(line)
    if size is None or size.wrong or not experts or not micro:
        return
    value = int(size.value or 0)
    if value * experts >= max(micro) and 32 * experts >= max(micro):
        same = f"{value} and 32 times {experts} experts both reach u-batch {max(micro)}"
        size.say(Status.INERT, f"the same path as the default: {same}", f"{IK_SOURCE}, ggml-cuda.cu:2906")


def exclusive(line: Line) -> None:
    fit = line.flag("--fit")
    if line.engine == IK and fit is not None and fit.value != "0":
        for name in ("-ot", "-ncmoe", "--n-cpu-moe", "-cmoe"):
            item = line.flag(name)
            if item is not None and (name == "-ot" or item.value != "0"):
                source = f"{IK_SOURCE}, src/llama.cpp:4281-4288"
                item.say(Status.INVALID, f"{name} cannot be combined with --fit: the program stops", source)
    for name in ("-rtr", "-muge"):
        repack, mapped = line.flag(name), line.flag("-mmp")
        if repack is not None and repack.value != "0" and mapped is not None and mapped.value == "1":
            mapped.say(Status.INERT, f"{name} turns mmap off")
        for item in line.all("flag", "--no-mmap") if repack is not None and line.engine == IK else []:
            item.say(Status.INERT, f"{name} turns mmap off already")


def rope_cache(line: Line) -> None:
    item = line.flag("-rcache")
    if item is not None and item.flag is not None:
        item.say(Status.INERT, "accepted, but without any effect", IK_SOURCE)


def expert_reduction(line: Line) -> None:
    item = line.flag("-ser")
    if item is not None and line.engine == IK and line.version.since("2025-10-19"):
        item.say(Status.INERT, "accepted, but ignored since 7a41b3b1f (2025-10-19, PR 840)", IK_SOURCE)


def environment(line: Line) -> None:
    """Report variables whose value has no effect."""
    fusion, launch = line.last("env", "GGML_CUDA_DISABLE_FUSION"), line.last("env", "GGML_CUDA_PDL")
    if line.engine != MAIN:
        return
    if fusion is not None and fusion.value in ("0", ""):
        fusion.say(Status.INERT, "fusion stays on: any value but 0 turns it off", MAIN_SOURCE)
    if launch is not None and launch.value != "0":
        launch.say(Status.INERT, "on by default: only 0 changes anything", MAIN_SOURCE)


# Repetitions of these flags add up. For all others, the common tools take the last one.
_ADD_UP = frozenset({"-ot", "-op", "-C", "-Cr", "-fitt", "-ncffn", "-npp", "-ntg", "-npl"})
_OPPOSITES = {
    "-no-fa": "-fa", "-no-gr": "-gr", "-nr": "--repack", "--no-op-offload": "--op-offload", "-nkvo": "-kvo",
    "-no-kvu": "-kvu", "-nocb": "-cb",
}  # fmt: skip


def _place(item: Item, line: Line) -> tuple[str, str] | None:
    """The setting that a token sets. Of two tokens for the same setting, the later one is in force. None:
    both are."""
    if item.kind in ("env", "cmake", "cuda") or (item.kind, item.name) == ("flag", "-cuda"):
        return item.kind, item.name
    if item.kind != "flag" or item.flag is None or line.bench or item.name in _ADD_UP:
        return None
    if item.name in ("-cmoe", "-ncmoe"):  # in llama.cpp, and before that date, they also add up
        return ("flag", "-ncmoe") if line.engine == IK and line.version.since("2026-03-19") else None
    if item.name == "--spec-type" and line.engine == IK:  # each one adds a kind
        return None
    if not item.flag.takes and item.name not in {*_OPPOSITES, *_OPPOSITES.values()}:
        return None
    return "flag", _OPPOSITES.get(item.name, item.name)


def repeated(line: Line) -> None:
    """Mark tokens that a later one overrides. The following rules see only tokens in force."""
    last = {place: i for i in line.items if (place := _place(i, line)) is not None}
    whole: Item | None = None  # the token that overrides the -cuda of the current keys
    for item in line.items:
        if item.kind != "cuda":
            whole = None
        place = _place(item, line)
        later = last[place] if place is not None else item
        if later is item:
            later = whole or item
        if later is item:
            continue
        item.replaced = True
        item.say(Status.INERT, f"{later.text} comes later and overrides it")
        if item.name == "-cuda":
            whole = later


RULES: tuple[Callable[[Line], None], ...] = (
    repeated, gpu_limits, architectures, single_gpu, defaults, batch_sizes, slots, cache_types,
    latent_attention, split_modes, graphs, offload, expert_kernels, exclusive, expert_reduction,
    rope_cache, environment, override_rules, placement, draft_rules,
)  # fmt: skip
