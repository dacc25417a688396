"""Flags of both engines, with their effects and the tools that accept them.

The rows describe ik_llama.cpp at 8337e4cd3 (2026-08-15) and llama.cpp at 0c1e57098. The long spellings after
the first name come from `--help`. A flag without a row is unknown, which is not an error, because the tables
only list flags that affect speed, memory or answers.
"""

from __future__ import annotations

from .drafts import DRAFT_FLAGS
from .line import BENCH, BOTH_TOOLS, COMMON, ENGINES, IK, MAIN, Flag

_IK, _MAIN, _C, _B = (IK,), (MAIN,), (COMMON,), (BENCH,)
_KV = "f32|f16|bf16|q8_0|q4_0|q4_1|iq4_nl|q5_0|q5_1"
_SLOTS = (
    "sequences that a server generates at the same time. They share -c. More sequences raise the total "
    "tokens per second, but each one gets slower"
)
# Words that llama.cpp reads as on and off. ik_llama.cpp has a separate list for each flag.
_ON_OFF = ("enabled", "true", "1", "disabled", "false", "0")
_TEMPERATURE = (
    "temperature of sampling; 0: always the most probable token; changes answers, but not the speed"
)


def _rows(names: str, does: str, engines: tuple[str, ...] = ENGINES, tools: tuple[str, ...] = BOTH_TOOLS, *,
          takes: bool = True, values: str = "", form: str = "", optional: bool = False,
          where: str = "", also: tuple[str, ...] = ()) -> list[Flag]:  # fmt: skip
    """The rows of a flag that is the same in each of these engines."""
    words = tuple(values.split("|")) if values else ()
    return [
        Flag(tuple(names.split()), does, e, tools, takes, words, form, optional, where, also) for e in engines
    ]


def _switch(names: str, does: str, engines: tuple[str, ...] = ENGINES, *, where: str = "") -> list[Flag]:
    """A flag of the common tools that takes no value."""
    return _rows(names, does, engines, _C, takes=False, where=where)


def _toggle(names: str, does: str, *, where: str = "") -> list[Flag]:
    """A switch of ik_llama.cpp's common tools, which in its llama-bench may be followed by 0 or 1."""
    bench = _rows(names, does, _IK, _B, values="0|1", optional=True)
    return [*_switch(names, does, _IK, where=where), *bench]


def _cache_rows(letter: str) -> list[Flag]:
    """The flags of the K cache or of the V cache."""
    names, of = f"-ct{letter} --cache-type-{letter}", f"type of the {letter.upper()} cache"
    rotated = "Quantized caches are rotated (off with LLAMA_ATTN_ROT_DISABLE)"
    ends = [
        _rows(f"-ct{letter}-{end} --cache-type-{letter}-{end}",
              f"{of} in the {end} layers, as TYPE,N; changes answers", _IK, _C)
        for end in ("first", "last")
    ]  # fmt: skip
    return [
        *_rows(names, f"{of}; changes answers", _IK, values=f"{_KV}|q6_0|q8_KV"),
        *_rows(names, f"{of}; changes answers. {rotated}", _MAIN, values=_KV,
               where="src/llama-kv-cache.cpp:315-345"),
        *_switch(f"-{letter}had --{letter}-cache-hadamard",
                 f"Hadamard rotation of the {letter.upper()} cache", _IK, where="common.cpp:2246"),
        *ends[0], *ends[1],
    ]  # fmt: skip


FLAGS: tuple[Flag, ...] = (
    # Batch sizes, layers, placement
    *_rows("-m --model", "model file"),
    *_rows("-f --file", "text file", tools=_C),
    *_rows("-c --ctx-size", "context length; -b is cut to it", tools=_C, form="int"),
    *_rows("-b --batch-size", "logical batch, default 2048; cut to the context", form="int",
        where="n_batch=min(n_ctx,b)"),
    *_rows("-ub --ubatch-size", "physical batch, default 512; cut to -b. Buffers grow with it. It decides "
        "the prompt speed with offloaded weights, because that many tokens share each upload of an expert",
        form="int", where="n_ubatch=min(n_batch,ub)"),
    *_rows("-ngl --n-gpu-layers --gpu-layers",
        "layers on the GPU; by default all if there is a GPU; memory is checked only with --fit", _IK,
        _C, form="int", where="src/llama.cpp:7756"),
    *_rows("-ngl --n-gpu-layers", "layers on the GPU, default 999", _IK, _B, form="int"),
    *_rows("-ngl --n-gpu-layers --gpu-layers", "layers on the GPU: a number, auto or all; default auto",
        _MAIN, _C, values="auto|all", form="int", where="arg.cpp:2789"),
    *_rows("-ngl --n-gpu-layers", "layers on the GPU, default -1 (automatic)", _MAIN, _B, form="int"),
    *_rows("-ot --override-tensor",
        "tensors that match a pattern go to a buffer (CPU, CUDA0, …); the first rule that matches wins"),
    *_switch("-cmoe --cpu-moe", "expert tensors of all layers stay in host memory"),
    *_rows("-ncmoe --n-cpu-moe", "expert tensors of the first N layers stay in host memory", tools=_C,
        form="int"),
    *_rows("-ncmoe --n-cpu-moe", "expert tensors of the first N layers stay in host memory", _MAIN, _B,
        form="int"),
    *_rows("--n-cpu-moe", "expert tensors of the first N layers stay in host memory", _IK, _B, form="int"),
    *_rows("-ncffn --n-cpu-ffn", "the first N layers' FFN tensors stay in host memory", _MAIN, _C, form="int",
        where="arg.cpp:2777"),
    *_switch("--fit", "places experts by free memory; sets -ngl 999", _IK, where="src/llama.cpp:4281-4288"),
    *_rows("--fit", "places experts by free memory", _IK, _B, values="0|1"),
    *_rows("--fit-margin", "MiB that --fit leaves free", _IK, form="int", where="common.cpp:2187"),
    *_rows("-fit --fit", "adjusts unset options to the free memory; on by default", _MAIN, _C,
        values="on|off", where="arg.cpp:2868-2921", also=_ON_OFF),
    *_rows("-fitt --fit-target", "MiB that -fit leaves free per device, default 1024", _MAIN),
    *_rows("-fitc --fit-ctx", "smallest context that -fit may choose, default 4096", _MAIN, form="int"),
    *_rows("-sm --split-mode", "how several GPUs share the model; graph only for some architectures", _IK, _C,
        values="none|layer|attn|graph", where="common.cpp:2054, src/llama.cpp:3895-3926"),
    *_rows("-sm --split-mode", "how several GPUs share the model", _IK, _B, values="none|layer|graph"),
    *_rows("-sm --split-mode", "how several GPUs share the model; row is deprecated, tensor experimental "
        "(flash attention on, KV cache unquantized, not for DEEPSEEK2)", _MAIN,
        values="none|layer|row|tensor", where="arg.cpp:2807"),
    *_rows("-ts --tensor-split", "proportions of the GPUs"),
    *_rows("-mg --main-gpu", "number of the main GPU", form="int"),
    *_rows("--max-gpu", "GPUs per layer in a graph split", _IK, form="int"),
    *_rows("-dev --device", "devices to use", tools=_C),
    *_rows("-dev --device", "devices to use", _MAIN, _B),
    *_switch("-smgs --split-mode-graph-scheduling", "scheduling of the graph split", _IK),
    *_toggle("-sas --scheduler-async", "asynchronous scheduler of the graph split"),
    *_rows("-grt --graph-reduce-type",
        "type of the reduction in a graph split (gpt-oss: f32 instead of f16)", _IK, _C,
        values="f16|bf16|f32|q8_0", where="src/llama.cpp:8226-8233"),
    *_rows("-np --parallel", f"{_SLOTS}; default 1", _IK, _C, form="int"),
    *_rows("-np --parallel", f"{_SLOTS}; default -1: the server chooses", _MAIN, _C, form="int"),
    *_switch("-cb --cont-batching", "a new request joins the running ones between two steps (default)"),
    *_switch("-nocb --no-cont-batching",
        "a new request waits until the running ones have ended: fewer tokens per second with several slots"),
    # Threads and host memory
    *_rows("-t --threads",
        "threads for generation; in llama-bench and without -tb also for prompts"),
    *_rows("-tb --threads-batch", "threads for prompts; default -t", tools=_C, form="int"),
    *_rows("-tgb --threads-gen-batch", "pairs of thread counts for generation and prompts", _IK, _B),
    *_rows("-C --cpu-mask", "CPU mask", _MAIN),
    *_rows("-Cr --cpu-range", "CPU range", _MAIN, _C),
    *_rows("--cpu-strict", "threads stay on their CPU", _MAIN, values="0|1"),
    *_rows("--prio", "priority of the threads", _MAIN, form="int"),
    *_rows("--poll", "how long threads spin before they sleep, 0 to 100", _MAIN, form="percent"),
    *_rows("--numa", "placement on NUMA nodes", values="distribute|isolate|numactl"),
    *_switch("--no-mmap", "reads the file into memory instead of mapping it", _IK),
    *_rows("-mmp --mmap", "maps the file (1) or reads it (0)", _IK, _B, values="0|1"),
    *_rows("-lm --load-mode", "how the file is loaded; replaces --no-mmap, --mlock and -mmp", _MAIN,
        values="auto|none|mmap|mlock|mmap+mlock|dio", where="arg.cpp:2691"),
    *_rows("-lzm --lazy-mode", "lazy loading", _MAIN),
    *_toggle("-thp --transparent-huge-pages", "huge pages for weights in host memory"),
    *_toggle("--defer-experts", "experts are loaded late"),
    *_switch("--prefetch-experts", "experts are prefetched", _IK),
    *_toggle("-mqkv --merge-qkv", "merges the Q, K and V weights"),
    *_toggle("-muge --merge-up-gate-experts", "merges up and gate weights of experts; no mmap"),
    *_toggle("-gr --graph-reuse", "reuse of graphs, on by default"),
    *_switch("-no-gr --no-graph-reuse", "no reuse of graphs", _IK),
    *_rows("-mea --max-extra-alloc", "MiB of extra allocation, default 256", _IK, _C, form="int"),
    *_switch("-dr --dry-run", "dry run", _IK, where="common.cpp:2494"),
    *_rows("-wgt --worst-graph-tokens", "tokens of the largest graph, which determines the size of the "
        "buffers", _IK, _C,
        form="int"),
    *_switch("-nkvo --no-kv-offload", "KV cache in host memory"),
    *_rows("-nkvo --no-kv-offload", "KV cache in host memory", tools=_B, values="0|1"),
    *_switch("-kvo --kv-offload", "KV cache on the GPU (default)", _MAIN),
    *_switch("-kvu --kv-unified", "one KV buffer for all sequences", _MAIN),
    *_switch("-no-kvu --no-kv-unified", "a KV buffer for each sequence", _MAIN),
    *_switch("--swa-full", "full cache for sliding-window models: more memory, needed for context shifts",
        _MAIN),
    *_switch("--no-host", "does not use pinned host buffers, so that other buffer types can be used", _MAIN),
    *_rows("--no-host", "does not use pinned host buffers, so that other buffer types can be used", _MAIN, _B,
        values="0|1"),
    *_switch("--repack", "repacks host weights at load (Q4_0 and others); on by default", _MAIN),
    *_rows("--repack", "repacks host weights at load", _MAIN, _B, values="0|1", optional=True),
    *_switch("-nr --no-repack", "no repacking of host weights", _MAIN),
    # Attention
    *_rows("-fa --flash-attn", "flash attention; auto is the same as on", _IK, _C, values="on|off|auto|0|1",
        where="common.cpp:1927"),
    *_rows("-fa --flash-attn", "flash attention, default 1", _IK, _B, values="0|1"),
    *_rows("-fa --flash-attn", "flash attention, default auto", _MAIN, values="on|off|auto",
        where="arg.cpp:1754", also=(*_ON_OFF, "-1")),
    *(flag for letter in "kv" for flag in _cache_rows(letter)),
    *_rows("-mla --mla-use", "cache form of latent attention: 0 expanded, 1 latent, 2 latent with expanded "
        "prompts, 3 like 2 with absorbed generation; default 3, forced 0 for other models and 3 on partial "
        "offload", _IK, values="0|1|2|3", where="src/llama.cpp:8215-8225"),
    *_rows("-amb --attention-max-batch", "most MiB for the temporaries of attention (default 256, in "
        "llama-bench 0; at least 128, 0: no limit): less memory, more launches", _IK, form="int",
        where="common.cpp:1964"),
    # Offload of host weights
    *_rows("-op --offload-policy", "which ops run on the GPU although their weights are in host memory, by "
        "op id",
        _IK, _C, where="common.cpp:2541"),
    *_toggle("-no-ooae --no-offload-only-active-experts",
        "uploads all experts instead of the ones the router chose", where="common.cpp:2552"),
    *_switch("--no-op-offload", "ops with weights in host memory stay on the CPU", _MAIN),
    *_switch("--op-offload", "ops with weights in host memory may run on the GPU (default)", _MAIN),
    *_rows("-nopo --no-op-offload", "1: ops with weights in host memory stay on the CPU", _MAIN, _B,
        values="0|1"),
    *_rows("-cuda --cuda-params", "parameters of the CUDA backend, key=value,…; the last -cuda wins", _IK,
        where="ggml-cuda.cu:5299-5388"),
    # Mixtures of experts, fusion
    *_switch("-no-fmoe --no-fused-moe",
        "no fused up+gate of experts; also ends CUDA graphs in generation with experts", _IK,
        where="common.cpp:1973"),
    *_rows("-fmoe --fused-moe", "fused up+gate of experts, default 1", _IK, _B, values="0|1"),
    *_rows("-rcache --rope-cache", "accepted, but no longer used", _IK, _B, values="0|1", optional=True),
    *_switch("-no-fa --no-flash-attn", "no flash attention, as -fa off", _IK),
    *_toggle("-no-fug --no-fused-up-gate", "no fused dense up+gate"),
    *_switch("-no-mmad --no-fused-mul-multiadd", "no fused multiply and add of expert outputs", _IK),
    *_switch("-ger --grouped-expert-routing",
        "grouped expert routing (bailingmoe2 and 3), off by default; changes answers", _IK),
    *_rows("-ger --grouped-expert-routing", "grouped expert routing, default 0; changes answers", _IK, _B,
        values="0|1", optional=True),
    *_rows("-ser --smart-expert-reduction", "fewer experts per token", _IK),
    *_switch("-rtr --run-time-repack", "repacks weights in host memory to interleaved types; no mmap. "
        "Weights in types that CUDA does not support are then computed on the CPU", _IK,
        where="common.cpp:2225, src/llama.cpp:4912"),
    *_rows("-rtr --run-time-repack", "repacks weights in host memory; no mmap", _IK, _B, values="0|1"),
    # Benchmarks and quality
    *_rows("-p --n-prompt", "prompt tokens of a test", tools=_B),
    *_rows("-n --n-gen", "generated tokens of a test", tools=_B),
    *_rows("-n --predict --n-predict", "tokens to generate", tools=_C),
    *_rows("--temp", _TEMPERATURE, _IK, _C),
    *_rows("--temp --temperature", _TEMPERATURE, _MAIN, _C),
    *_rows("-p --prompt", "prompt", tools=_C),
    *_rows("-pg", "prompt and generation in one test: pp,tg", tools=_B),
    *_rows("-gp", "generation after a prompt, instead of a depth", _IK, _B),
    *_rows("-d --n-depth", "tokens in the cache before a test", _MAIN, _B),
    *_rows("-r --repetitions", "repetitions, default 5", tools=_B, form="int"),
    *_rows("-o --output", "format of the output", _IK, _B, values="csv|json|md|sql"),
    *_rows("-o --output", "format of the output", _MAIN, _B, values="csv|json|jsonl|md|sql"),
    *_rows("-oe --output-err", "a second copy of the output on stderr", tools=_B),
    *_rows("-w --warmup", "warm-up run", _IK, _B, values="0|1"),
    *_rows("-embd --embeddings", "embeddings", tools=_B, values="0|1", optional=True),
    *_rows("--print-overrides", "prints which tensors -ot moved", _IK, _B, values="0|1", optional=True),
    *_rows("--delay", "seconds between tests", _MAIN, _B, form="int"),
    *_rows("--no-warmup", "no warm-up run", _MAIN, _B, takes=False),
    *_rows("--progress", "shows progress", _MAIN, _B, takes=False),
    *_rows("--list-devices", "lists devices", _MAIN, _B, takes=False),
    *_rows("--version", "prints the version", _MAIN, takes=False),
    *_switch("--version", "prints the version", _IK),
    *_rows("-nrep --n-repetitions", "repetitions of the first row (llama-sweep-bench)", _IK, _C, form="int"),
    *_switch("-wb --warmup-batch", "warm-up batch (llama-sweep-bench)", _IK),
    *_rows("--sweep-stride", "step between rows (llama-sweep-bench)", _IK, _C),
    *_switch("--sweep-memory", "adds memory columns (llama-sweep-bench)", _IK),
    *_rows("--output-format", "format of the output (llama-sweep-bench)", _IK, _C),
    *_rows("--output-format", "format of the output (llama-batched-bench)", _MAIN, _C, values="md|jsonl"),
    *_rows("-npp", "prompt tokens (llama-batched-bench)", tools=_C),
    *_rows("-ntg", "generated tokens (llama-batched-bench)", tools=_C),
    *_rows("-npl", "parallel sequences (llama-batched-bench)", tools=_C),
    *_rows("--chunks", "chunks of the text (llama-perplexity)", tools=_C, form="int"),
    *_rows("--kl-divergence-base --save-all-logits", "file of the reference's logits (llama-perplexity)",
        tools=_C),
    *_switch("--kl-divergence", "compares with the reference's logits (llama-perplexity)"),
    *DRAFT_FLAGS,
)  # fmt: skip

# Programs whose arguments the tables describe. Only ik_llama.cpp has llama-sweep-bench.
TOOLS = (
    "llama-server",
    "llama-cli",
    "llama-bench",
    "llama-sweep-bench",
    "llama-perplexity",
    "llama-batched-bench",
)
IK_TOOLS = ("llama-sweep-bench",)


def find_flag(name: str, engine: str, tool: str) -> Flag | None:
    """The row of a flag in one engine and kind of tool."""
    return next((f for f in FLAGS if f.engine == engine and tool in f.tools and name in f.names), None)


def engines_of(name: str) -> set[str]:
    """The engines that have a flag of this spelling in any tool."""
    return {f.engine for f in FLAGS if name in f.names}
