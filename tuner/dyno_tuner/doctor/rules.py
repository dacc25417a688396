"""What holds between tokens, and between a token and the GPU or the model.

`LIMITS` are statements about one switch or flag on some GPUs; the functions below are the combinations. A
rule speaks only where the line and the facts show its premise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .flags import IK_SOURCE, MAIN_SOURCE
from .line import IK, MAIN, Item, Line, Status

if TYPE_CHECKING:
    from collections.abc import Callable

_OFF = frozenset({"0", "off", "false", "no", "n", "ignore", "notfound", ""})
OFFLOAD_SOURCE = f"{IK_SOURCE}, ggml-cuda.cu:5180-5207"


def is_on(value: str | None) -> bool:
    return (value or "").strip().lower() not in _OFF


@dataclass(frozen=True)
class Limit:
    """What a switch means on GPUs with `low` <= compute capability < `high`. `on`: only when switched on."""

    kind: str
    name: str
    engine: str
    low: float
    high: float
    status: Status
    text: str
    on: bool = True
    value: str | None = None


_NO_BF16 = "this GPU has no bf16 tensor cores: emulated and slow; use it from 8.0 on"
_NO_GRAPHS_IK = "CUDA graphs are off at run time below compute capability 8.0, with or without this"
_NO_GRAPHS_MAIN = "CUDA graphs are off at run time below compute capability 7.0, with or without this"
_MMQ = "no effect from compute capability 7.5 on: MMQ is chosen before the macro is looked at"
_INF = 99.0
LIMITS: tuple[Limit, ...] = (
    Limit("cmake", "GGML_CUDA_IQK_FORCE_BF16", IK, 0, 8.0, Status.WRONG_GPU, _NO_BF16),
    Limit("env", "GGML_CUDA_CUBLAS_COMPUTE_TYPE", MAIN, 0, 8.0, Status.WRONG_GPU, _NO_BF16, value="bf16"),
    Limit("cmake", "GGML_CUDA_F16", IK, 0, 6.0, Status.WRONG_GPU, "not for GPUs below 6.0"),
    Limit("cmake", "GGML_CUDA_F16", IK, 6.1, 6.2, Status.WRONG_GPU, "fp16 runs at 1/64 of the rate on 6.1"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", IK, 7.5, _INF, Status.INERT, _MMQ),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", MAIN, 7.5, _INF, Status.INERT,
          _MMQ + " (but for Turing without tensor cores, with the architectures 61-virtual;80-virtual)"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", IK, 6.1, 7.0, Status.INERT, "MMQ is always used here"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", MAIN, 6.1, 7.0, Status.INERT, "MMQ is always used here"),
    Limit("cmake", "GGML_CUDA_USE_GRAPHS", IK, 0, 8.0, Status.INERT, _NO_GRAPHS_IK, on=False),
    Limit("cmake", "GGML_CUDA_GRAPHS", MAIN, 0, 7.0, Status.INERT, _NO_GRAPHS_MAIN, on=False),
    Limit("env", "GGML_CUDA_DISABLE_GRAPHS", IK, 0, 8.0, Status.INERT, _NO_GRAPHS_IK, on=False),
    Limit("env", "GGML_CUDA_DISABLE_GRAPHS", MAIN, 0, 7.0, Status.INERT, _NO_GRAPHS_MAIN, on=False),
    Limit("cuda", "graphs", IK, 0, 8.0, Status.INERT, _NO_GRAPHS_IK, on=False),
    Limit("env", "GGML_CUDA_GRAPH_OPT", MAIN, 0, 7.0, Status.INERT, "it needs CUDA graphs, which are off "
        "below 7.0"),
    Limit("env", "GGML_CUDA_PDL", MAIN, 0, 9.0, Status.INERT, "effective on Hopper (9.0) and later",
        on=False),
)  # fmt: skip


def gpu_limits(line: Line) -> None:
    cc = line.facts.cc
    for limit in LIMITS if cc is not None else ():
        for item in line.all(limit.kind, limit.name):
            right = limit.value is None or (item.value or "").lower() == limit.value
            if (
                limit.engine == line.engine
                and limit.low <= (cc or 0) < limit.high
                and right
                and (not limit.on or is_on(item.value))
            ):
                source = IK_SOURCE if line.engine == IK else MAIN_SOURCE
                item.say(limit.status, f"at {cc:g}: {limit.text}", source)


def architectures(line: Line) -> None:
    item = line.last("cmake", "CMAKE_CUDA_ARCHITECTURES")
    cc = line.facts.cc
    if item is None or cc is None or not item.value:
        return
    numbers = [p.partition("-")[0].rstrip("af") for p in item.value.split(";")]
    if not all(n.isascii() and n.isdigit() and len(n) < 4 for n in numbers):
        return
    usable = [int(n) / 10 for n in numbers if int(n) / 10 <= cc + 1e-9]
    if not usable:
        item.say(Status.WRONG_GPU, f"no architecture of the list runs on {cc:g}")
    elif cc >= 7.5 and max(usable) < 7.5:
        item.say(
            Status.WRONG_GPU,
            f"at {cc:g} code for {max(usable):g} runs, without tensor-core kernels; add {cc * 10:g}",
        )


def single_gpu(line: Line) -> None:
    if line.facts.gpus != 1:
        return
    for kind, name in (("flag", "-sm"), ("cmake", "GGML_SCHED_MAX_COPIES"), ("cmake", "GGML_NCCL"),
                       ("cmake", "GGML_CUDA_NCCL")):  # fmt: skip
        for item in line.all(kind, name):
            if not any(n.wrong for n in item.notes):
                item.say(Status.INERT, "changes nothing with one GPU")


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
            item.say(Status.INVALID, f"{min(sizes)} tokens make no batch")


QUANT_KV = frozenset({"q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "q6_0", "q8_KV"})
FA_PAIRS = {
    IK: {("q4_0", "q4_0"), ("q8_0", "q8_0"), ("f16", "f16"), ("q8_0", "iq4_nl"), ("iq4_nl", "iq4_nl"),
         ("q6_0", "q5_0"), ("q8_0", "q6_0")},
    MAIN: {("q4_0", "q4_0"), ("q8_0", "q8_0"), ("f16", "f16"), ("bf16", "bf16")},
}  # fmt: skip


def _fa_off(line: Line) -> bool:
    item = line.flag("-fa")
    return item is not None and item.value in ("off", "0")


def cache_types(line: Line) -> None:
    k_item, v_item = line.flag("-ctk"), line.flag("-ctv")
    if v_item is not None and v_item.value in QUANT_KV and _fa_off(line):
        v_item.say(Status.INVALID, "a quantized V cache needs flash attention, which this line turns off")
    if _fa_off(line):
        return
    for item in (k_item, v_item):
        if line.engine == MAIN and item is not None and item.value == "iq4_nl":
            item.say(
                Status.INVALID,
                "CUDA flash attention does not take iq4_nl here",
                f"{MAIN_SOURCE}, cuda/fattn.cu:525-539",
            )
    pair = ((k_item.value if k_item else None) or "f16", (v_item.value if v_item else None) or "f16")
    if (k_item or v_item) and "," not in "".join(pair) and pair not in FA_PAIRS[line.engine]:
        build = (
            "GGML_CUDA_FA_ALL_QUANTS=ON"
            if line.engine == IK
            else "GGML_CUDA_FA_QUANTS (else slower, by way of f16)"
        )
        for item in (k_item, v_item):
            if item is not None and not item.wrong:
                item.say(
                    Status.NEEDS,
                    f"flash attention on CUDA for K {pair[0]} with V {pair[1]} needs a build with {build}",
                )


def latent_attention(line: Line) -> None:
    arch, mla, amb = line.facts.architecture, line.flag("-mla"), line.flag("-amb")
    if mla is not None and arch is not None and arch != "deepseek2":
        mla.say(Status.INERT, f"forced to 0: {arch} has no latent attention")
    absorbed = mla is not None and mla.value in ("0", "1")
    if amb is not None and absorbed and not _fa_off(line):
        amb.say(Status.INERT, "matters only for prompts with -mla 2 or 3, or without flash attention")
    split = line.flag("-sm")
    if split is not None and split.value == "graph" and line.engine == IK:
        if mla is not None and mla.value == "0":
            mla.say(Status.INVALID, "a graph split of a latent-attention model stops with -mla 0")
        if _fa_off(line) and (arch == "deepseek2" or (mla is not None and arch is None)):
            split.say(
                Status.INVALID, "a graph split of a latent-attention model stops without flash attention"
            )


def split_modes(line: Line) -> None:
    split = line.flag("-sm")
    if split is None:
        return
    on = line.cuda("graphs")
    if line.engine == IK and split.value == "graph" and on is not None and on.value == "1":
        on.say(Status.INERT, "a graph split runs without CUDA graphs")
    if line.engine == MAIN and split.value == "row":
        split.say(Status.DOES, "row is deprecated")
    if line.engine == MAIN and split.value == "tensor":
        if _fa_off(line):
            split.say(Status.INVALID, "split mode tensor needs flash attention, which this line turns off")
        for name in ("-ctk", "-ctv"):
            item = line.flag(name)
            if item is not None and item.value in QUANT_KV:
                item.say(Status.INVALID, "split mode tensor needs an unquantized KV cache")


def graphs(line: Line) -> None:
    opt, off = line.last("env", "GGML_CUDA_GRAPH_OPT"), line.last("env", "GGML_CUDA_DISABLE_GRAPHS")
    if opt is not None and line.engine == MAIN:
        if opt.value != "1":
            opt.say(Status.INERT, "only the value 1 turns it on")
        elif off is not None:
            opt.say(Status.INERT, "it needs CUDA graphs, which GGML_CUDA_DISABLE_GRAPHS turns off")
        elif (built := line.last("cmake", "GGML_CUDA_GRAPHS")) is not None and not is_on(built.value):
            opt.say(Status.INERT, "it needs CUDA graphs, which this build leaves out")
    on = line.cuda("graphs")
    if on is not None and on.value == "1" and off is not None:
        on.say(Status.INERT, "GGML_CUDA_DISABLE_GRAPHS turns them off")
    fused = line.flag("-no-fmoe")
    if on is not None and on.value == "1" and fused is not None:
        on.say(Status.INERT, "generation with experts has no CUDA graphs under -no-fmoe")
    built = line.last("cmake", "GGML_CUDA_USE_GRAPHS")
    if on is not None and built is not None and not is_on(built.value):
        on.say(Status.INVALID, "this build leaves graphs out, so that the key is unknown")


def _host_flags(line: Line) -> list[Item]:
    return [i for n in ("-ot", "-cmoe", "-ncmoe", "-ncffn", "--fit", "-fit") for i in line.all("flag", n)]


def all_on_gpu(line: Line) -> bool:
    """True where the line puts every weight on the GPU for certain."""
    layers = line.facts.layers
    number = line.numbers("-ngl")
    item = line.flag("-ngl")
    everything = (item is not None and item.value == "all") or bool(
        number and (min(number) >= 999 or (layers is not None and min(number) > layers))
    )
    return everything and not _host_flags(line)


def offload(line: Line) -> None:
    policy = [i for n in ("-op", "-no-ooae", "-nopo", "--no-op-offload") for i in line.all("flag", n)]
    policy += [i for n in ("offload-batch-size", "offload-batch-size-per-byte") for i in line.all("cuda", n)]
    policy += line.all("env", "GGML_OP_OFFLOAD_MIN_BATCH")
    if all_on_gpu(line):
        for item in [*policy, *line.all("flag", "-rtr")]:
            if not item.wrong:
                item.say(
                    Status.INERT, "only for weights in host memory, and this line puts all of them on the GPU"
                )
        return
    experts, used, micro = line.facts.experts, line.facts.experts_used, line.numbers("-ub", 512)
    size, per_byte = line.cuda("offload-batch-size"), line.cuda("offload-batch-size-per-byte")
    if line.engine != IK or not experts or not used or not micro or per_byte is not None:
        return
    if size is not None and size.wrong:
        return
    least = int(size.value) if size is not None and size.value else 32
    threshold = -(-least * experts // used)
    if max(micro) >= max(threshold, least):
        return
    text = (f"experts stay on the CPU below {threshold} tokens ({least} x {experts} experts / {used} used) "
        f"and -ub is "
            f"{max(micro)}")  # fmt: skip
    for item in policy:
        names: set[str | None] = {p["op"] for p in item.ops}
        if item.name == "-no-ooae" or (names and names <= {"MUL_MAT_ID", "MOE_FUSED_UP_GATE"}):
            item.say(Status.INERT, text, OFFLOAD_SOURCE)
        elif item.name == "-op" and names & {"MUL_MAT_ID", "MOE_FUSED_UP_GATE"}:
            item.say(Status.DOES, f"for the expert ops it changes nothing: {text}", OFFLOAD_SOURCE)


def expert_kernels(line: Line) -> None:
    dense = line.facts.moe is False
    for kind, name in (("cuda", "mmq-id-size"), ("flag", "-cmoe"), ("flag", "-ncmoe"), ("flag", "-no-fmoe"),
                       ("flag", "-fmoe"), ("flag", "-no-ooae"), ("flag", "-ger"), ("flag", "-muge"),
                       ("flag", "-no-mmad")):  # fmt: skip
        for item in line.all(kind, name):
            if dense and not item.wrong:
                item.say(Status.INERT, "the model has no experts")
    size = line.cuda("mmq-id-size")
    experts, micro = line.facts.experts, line.numbers("-ub", 512)
    if size is None or size.wrong or not experts or not micro or dense:
        return
    value = int(size.value or 0)
    if value * experts >= max(micro) and 32 * experts >= max(micro):
        size.say(Status.INERT, f"the same path as the default: {value} and 32 times {experts} experts both "
            f"reach u-batch "
                 f"{max(micro)}", f"{IK_SOURCE}, ggml-cuda.cu:2906")  # fmt: skip


def exclusive(line: Line) -> None:
    fit = line.flag("--fit")
    if line.engine == IK and fit is not None and fit.value != "0":
        for name in ("-ot", "-ncmoe"):
            item = line.flag(name)
            if item is not None:
                item.say(
                    Status.INVALID, f"{name} with --fit is an error", f"{IK_SOURCE}, src/llama.cpp:4281-4288"
                )
    for name in ("-rtr", "-muge"):
        repack, mapped = line.flag(name), line.flag("-mmp")
        if repack is not None and repack.value != "0" and mapped is not None and mapped.value == "1":
            mapped.say(Status.INERT, f"{name} turns mmap off")


def rope_cache(line: Line) -> None:
    item = line.flag("-rcache")
    if item is not None and item.flag is not None:
        item.say(Status.INERT, "read, and nothing is done with it any more", IK_SOURCE)


def expert_reduction(line: Line) -> None:
    item = line.flag("-ser")
    if item is not None and line.engine == IK and line.version.since("2025-10-19"):
        item.say(Status.INERT, "read and ignored since 7a41b3b1f (2025-10-19, PR 840)", IK_SOURCE)


def repeated(line: Line) -> None:
    found = line.all("flag", "-cuda")
    for item in found[:-1]:
        item.say(Status.INERT, "a later -cuda takes the place of this one")


RULES: tuple[Callable[[Line], None], ...] = (
    gpu_limits, architectures, single_gpu, defaults, batch_sizes, cache_types, latent_attention, split_modes,
        graphs,
    offload, expert_kernels, exclusive, expert_reduction, repeated, rope_cache,
)  # fmt: skip
