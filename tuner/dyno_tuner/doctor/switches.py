"""Build switches (cmake -D…) and environment variables of both engines, and the keys of ik_llama.cpp's
`-cuda`."""

from __future__ import annotations

from dataclasses import dataclass

from .line import ENGINES, IK, MAIN, SOURCES


@dataclass(frozen=True)
class Switch:
    """A row of the table of switches. `dead`: the reason why it has no effect in this engine, whatever its
    value. `gone`: the substitute, if the engine has removed it or never had it."""

    name: str
    engine: str
    does: str
    default: str | None = None
    dead: str | None = None
    gone: str | None = None
    lost: bool = False  # with `gone`: it existed before
    off: str | None = None  # build only: its effect when off, if that is more than "no effect"
    presence: bool = False  # env only: any value, even 0, counts as on
    where: str = ""
    values: tuple[str, ...] = ()  # env only: the valid words; empty: any

    @property
    def source(self) -> str:
        return ", ".join(filter(None, (SOURCES[self.engine], self.where)))


def _both(name: str, does: str, default: str | None = None) -> list[Switch]:
    return [Switch(name, e, does, default) for e in ENGINES]


def _ik(name: str, does: str, default: str | None = None, *, dead: str | None = None, main: str | None = None,
        lost: bool = False, off: str | None = None, where: str = "") -> list[Switch]:  # fmt: skip
    gone = main or "a switch of ik_llama.cpp; dyno's tables have none of this name in llama.cpp"
    other = Switch(name, MAIN, "", gone=gone, lost=lost)
    return [Switch(name, IK, does, default, dead=dead, off=off, where=where), other]


def _main(name: str, does: str, default: str | None = None, *, ik: str | None = None,
          off: str | None = None, where: str = "") -> list[Switch]:  # fmt: skip
    gone = ik or "a switch of llama.cpp; dyno's tables have none of this name in ik_llama.cpp"
    other = Switch(name, IK, "", gone=gone)
    return [Switch(name, MAIN, does, default, off=off, where=where), other]


_DMMV = "MMVQ or MMQ computes all 2-D quantized products of these types before this path is reached"
_NO_LTO = (
    "there is no such option: the branch was never merged (generation 2 to 3 % slower, link over 30 min)"
)

BUILD: tuple[Switch, ...] = (
    *_ik("GGML_CUDA_F16", "f16 instead of f32 in dequantisation and in three dot products; hardly any effect "
        "on speed, slightly lower precision for Q4_1/Q5_1/Q8_1",
        "OFF", main="llama.cpp no longer has it", lost=True,
        where="ggml/CMakeLists.txt:125, cuda/common.cuh:139"),
    *_ik("GGML_CUDA_IQK_FORCE_BF16",
        "bf16 instead of f16 in the fallback that dequantises for cuBLAS; avoids overflow in f16", "OFF",
        main="a switch of ik_llama.cpp; in llama.cpp, set the environment variable "
            "GGML_CUDA_CUBLAS_COMPUTE_TYPE=bf16",
        where="ggml-cuda.cu:1780-1818"),
    *_ik("GGML_CUDA_USE_GRAPHS", "compiles CUDA graphs (from CUDA 12 on)", "ON",
        main="a switch of ik_llama.cpp; in llama.cpp, use GGML_CUDA_GRAPHS",
        off="leaves CUDA graphs out; -cuda graphs=0 does the same without a new build",
        where="cuda/common.cuh:838"),
    *_main("GGML_CUDA_GRAPHS", "compiles CUDA graphs", "ON",
        off="leaves CUDA graphs out; GGML_CUDA_DISABLE_GRAPHS=1 does the same without a new build",
        ik="a switch of llama.cpp; in ik_llama.cpp, use GGML_CUDA_USE_GRAPHS", where="CMakeLists.txt:169"),
    Switch("GGML_CUDA_FORCE_MMQ", IK,
        "wider tiles of the quantized matrix kernels on Volta; GPUs from 6.1 on use those kernels anyway",
        "OFF", where="cuda/mmq.cu should_use_mmq, cuda/mmq.cuh:124-149"),
    Switch("GGML_CUDA_FORCE_MMQ", MAIN,
        "quantized matrix kernels instead of cuBLAS on GPUs without fast integer tensor cores", "OFF",
        where="cuda/mmq.cu should_use_mmq"),
    Switch("GGML_CUDA_FORCE_CUBLAS", IK,
        "cuBLAS instead of MMQ, but only for dense products; experts use mmq_id unless mmq-id-size=0", "OFF",
        where="cuda/mmq.cu:178, cuda/mmq_id.cu:499"),
    Switch("GGML_CUDA_FORCE_CUBLAS", MAIN, "cuBLAS instead of MMQ, dense and experts; experts then need the "
        "path that synchronises with the host, and run without CUDA graphs", "OFF", where="cuda/mmq.cu:319"),
    *_ik("GGML_CUDA_FORCE_DMMV", "legacy dequantise-mat-vec", "OFF", dead=_DMMV, main="llama.cpp no longer "
        "has it",
        lost=True, where="ggml-cuda.cu:2659-2689"),
    *_ik("GGML_CUDA_DMMV_X", "legacy dequantise-mat-vec", "32", dead=_DMMV, main="llama.cpp no longer has it",
        lost=True),
    *_ik("GGML_CUDA_MMV_Y", "legacy dequantise-mat-vec", "1", dead=_DMMV, main="llama.cpp no longer has it",
        lost=True),
    *_ik("GGML_CUDA_KQUANTS_ITER", "legacy dequantise-mat-vec", "2", dead=_DMMV, main="llama.cpp no longer "
        "has it",
        lost=True),
    *_ik("GGML_CUDA_PEER_MAX_BATCH_SIZE", "peer access by batch", "128",
        dead="the macro is defined, but never read", main="llama.cpp no longer has it", lost=True,
        where="ggml-cuda.cu:1570"),
    *_ik("GGML_CUDA_MIN_BATCH_OFFLOAD", "default of -cuda offload-batch-size", "32",
        main="a switch of ik_llama.cpp; in llama.cpp, set the environment variable GGML_OP_OFFLOAD_MIN_BATCH",
        where="ggml-cuda.cu:5301"),
    *_ik("GGML_CUDA_FUSION", "default of -cuda fusion", "1", main="fusion is always compiled in; the "
        "environment variable GGML_CUDA_DISABLE_FUSION=1 turns it off", where="ggml/CMakeLists.txt:136"),
    *_both("GGML_CUDA_NO_VMM", "the old memory pool instead of the one with virtual memory: more "
        "fragmentation",
        "OFF"),
    *_both("GGML_CUDA_NO_PEER_COPY", "no asynchronous copies between devices, and therefore no pipeline "
        "parallelism",
        "OFF"),
    *_ik("GGML_NCCL", "links NCCL if found, and forces peer access on",
        "ON", main="in llama.cpp, use GGML_CUDA_NCCL",
        where="ggml-cuda.cu:5441"),
    *_main("GGML_CUDA_NCCL", "links NCCL if found", "ON", ik="in ik_llama.cpp, use GGML_NCCL"),
    Switch("GGML_CUDA_FA_ALL_QUANTS", IK, "all pairs of K and V cache types in flash attention; the build "
        "takes long",
        "OFF", where="src/CMakeLists.txt:280-298"),
    Switch("GGML_CUDA_FA_ALL_QUANTS", MAIN, "deprecated alias of GGML_CUDA_FA_QUANTS=all"),
    *_main("GGML_CUDA_FA", "compiles flash attention", "ON"),
    *_main("GGML_CUDA_FA_QUANTS",
        "pairs of K and V cache types in flash attention; other pairs are converted to f16, which is slower",
        "q4_0-q4_0;q8_0-q8_0;f16-f16;bf16-bf16", ik="in ik_llama.cpp, use GGML_CUDA_FA_ALL_QUANTS",
        where="cuda/fattn.cu:744"),
    *_both("GGML_CUDA_COMPRESSION_MODE", "only the size of the binary and its load time (from CUDA 12.8 on)",
        "size"),
    Switch("GGML_SCHED_MAX_COPIES", IK, "copies of the inputs for pipeline parallelism (several GPUs, layer "
        "split, fully offloaded, no -ot); more copies need more memory", "1",
        where="src/llama.cpp:8610-8620"),
    Switch("GGML_SCHED_MAX_COPIES", MAIN, "copies of the inputs for pipeline parallelism (several GPUs, "
        "layer split, fully offloaded, no -ot); more copies need more memory", "4",
        where="ggml/CMakeLists.txt:188"),
    *_both("GGML_LTO", "link-time optimisation of host objects", "OFF"),
    *(Switch("GGML_CUDA_LTO", e, "", gone=_NO_LTO) for e in ENGINES),
    *_both("CMAKE_INTERPROCEDURAL_OPTIMIZATION", "link-time optimisation; of device code only with "
        "CMAKE_CUDA_SEPARABLE_COMPILATION and -dlto, which was slower in generation"),
    *_both("CMAKE_CUDA_SEPARABLE_COMPILATION",
        "device linking; part of device LTO, which was slower in generation"),
    *_both("CMAKE_CUDA_ARCHITECTURES", "GPU architectures to compile for; the kernels follow from the "
        "highest one that the GPU can run, so the list is a performance switch"),
    *_both("GGML_NATIVE", "code for this CPU", "ON"),
    *_ik("GGML_IQK_MUL_MAT", "all CPU iqk kernels", "ON"),
    *_ik("GGML_IQK_FLASH_ATTENTION", "flash attention on the CPU", "ON"),
    *_ik("GGML_IQK_FA_ALL_QUANTS", "all pairs of K and V cache types in flash attention on the CPU", "ON"),
    *_ik("GGML_EXPERT_CHUNKING", "experts on the CPU in chunks of rows", "ON"),
    *_ik("GGML_MAX_CONTEXTS", "largest number of contexts"),
    *_main("GGML_CPU_REPACK", "repacking of host weights at run time", "ON"),
    *_both("GGML_LLAMAFILE", "llamafile matrix kernels on the CPU"),
    *_main("GGML_CPU_ALL_VARIANTS", "CPU code for several instruction sets; needs GGML_BACKEND_DL"),
    *_main("GGML_BACKEND_DL", "backends as libraries that are loaded at run time"),
    *_both("GGML_OPENMP", "OpenMP threads", "ON"),
    *_both("GGML_CUDA", "CUDA backend", "OFF"),
    *_both("CMAKE_BUILD_TYPE", "build type"),
)  # fmt: skip


ENVIRONMENT: tuple[Switch, ...] = (
    Switch("GGML_CUDA_DISABLE_GRAPHS", IK, "no CUDA graphs", presence=True),
    Switch("GGML_CUDA_DISABLE_GRAPHS", MAIN, "no CUDA graphs", presence=True, where="cuda/common.cuh:1289"),
    Switch("GGML_CUDA_NO_PINNED", IK, "no pinned host memory", presence=True),
    Switch("GGML_CUDA_NO_PINNED", MAIN, "no pinned host memory", presence=True,
        where="cuda/ggml-cuda.cu:1272"),
    Switch("GGML_CUDA_ENABLE_UNIFIED_MEMORY", IK, "unified memory", presence=True),
    Switch("GGML_CUDA_ENABLE_UNIFIED_MEMORY", MAIN, "unified memory", presence=True,
        where="cuda/ggml-cuda.cu:144"),
    *_both("GGML_CUDA_REGISTER_HOST", "registers host memory with CUDA"),
    *_both("GGML_SCHED_DEBUG", "prints how the graph is split"),
    Switch("GGML_CUDA_HOST_MALLOC_THP", IK, "huge pages for host buffers"),
    Switch("GGML_MOE_PREFETCH_AHEAD", IK, "how far experts are prefetched"),
    Switch("IK_LEGACY_GRAPH_REUSE", IK, "the older method of graph reuse"),
    Switch("GGML_CUDA_GRAPH_OPT", MAIN, "only with the value 1: in generation, the Q, K and V branches run "
        "on concurrent streams, if the result of the attention norm goes into three products. This is no "
        "kernel fusion, which is separate and on by default. The number of GPUs is not checked. It gains "
        "only if one kernel cannot fill the GPU", where="cuda/ggml-cuda.cu:4613-4860"),
    Switch("GGML_CUDA_DISABLE_FUSION", MAIN, "no fusion of kernels (any value but 0)",
        where="cuda/ggml-cuda.cu:3446"),
    Switch("GGML_CUDA_P2P", MAIN, "peer access between GPUs", presence=True, where="cuda/ggml-cuda.cu:386"),
    Switch("GGML_CUDA_ALLREDUCE", MAIN, "how results of several GPUs are summed",
        where="cuda/ggml-cuda.cu:1220"),
    Switch("GGML_CUDA_DEVICES", MAIN, "devices to use", where="cuda/ggml-cuda.cu:236"),
    Switch("GGML_CUDA_MMQ_PREC", MAIN,
        "precision of activations for MXFP4 and NVFP4 on Blackwell (q4, q8, auto); changes answers",
        where="cuda/mmq.cu:96", values=("q4", "q8", "auto")),
    Switch("GGML_CUDA_CUBLAS_COMPUTE_TYPE", MAIN, "type that cuBLAS computes in: auto, f16, bf16, f32",
        where="cuda/ggml-cuda.cu:1617-1660", values=("auto", "f16", "bf16", "f32")),
    Switch("GGML_CUDA_PDL", MAIN, "programmatic dependent launch; on unless the value is 0",
        where="cuda/common.cuh:118-127"),
    Switch("GGML_OP_OFFLOAD_MIN_BATCH", MAIN, "smallest batch whose ops run on the GPU although their "
        "weights are in host memory, default 32; the number of experts does not count",
        where="cuda/ggml-cuda.cu:5825"),
    Switch("LLAMA_GRAPH_REUSE_DISABLE", MAIN, "no reuse of graphs"),
    Switch("LLAMA_ATTN_ROT_DISABLE", MAIN, "no rotation of quantized caches",
        where="src/llama-kv-cache.cpp:315-345"),
    *_both("CUDA_VISIBLE_DEVICES", "GPUs that the driver shows to the program"),
    *_both("CUDA_SCALE_LAUNCH_QUEUES", "launch queues of the driver (pipeline parallelism)"),
)  # fmt: skip
ENV_ELSEWHERE: dict[tuple[str, str], str] = {
    (IK, "GGML_CUDA_GRAPH_OPT"): "absent from ik_llama.cpp",
    (IK, "GGML_CUDA_DISABLE_FUSION"): "a variable of llama.cpp; in ik_llama.cpp, use -cuda fusion=0",
    (IK, "GGML_OP_OFFLOAD_MIN_BATCH"): "a variable of llama.cpp; in ik_llama.cpp, use -cuda "
        "offload-batch-size=N",
    (IK, "GGML_CUDA_P2P"): "a variable of llama.cpp; in ik_llama.cpp, use -cuda enable-p2p=1, the default",
    (IK, "GGML_CUDA_CUBLAS_COMPUTE_TYPE"):
        "a variable of llama.cpp; in ik_llama.cpp, use the build switch GGML_CUDA_IQK_FORCE_BF16",
}  # fmt: skip

# Keys of -cuda: (kind, default, effect)
CUDA_KEYS: dict[str, tuple[str, str, str]] = {
    "fusion": ("int", "1", "fusion of kernels by pattern; 0: off. It may change rounding"),
    "offload-batch-size": ("int", "32", "smallest batch whose ops run on the GPU although their weights are "
        "in host memory; for experts, multiplied by experts / experts used"),
    "offload-batch-size-per-byte": ("int", "-1", "smallest batch for experts, per byte of a weight; -1: off"),
    "mmq-id-size": ("int", "32", "largest number of tokens per expert of the model for the kernel mmq_id; "
        "0 never"),
    "enable-p2p": ("bool", "1", "peer access between GPUs; NCCL forces it on"),
    "fa-offset": ("float", "0.6931", "shift of the running maximum in flash attention, 0 to 3; changes "
        "rounding only"),
    "graphs": ("bool", "1", "CUDA graphs; the key is unknown if they were not compiled in"),
}  # fmt: skip


def find_build(name: str, engine: str) -> Switch | None:
    return next((s for s in BUILD if s.name == name and s.engine == engine), None)


def find_env(name: str, engine: str) -> Switch | None:
    return next((s for s in ENVIRONMENT if s.name == name and s.engine == engine), None)


BUILD_NAMES = frozenset(s.name for s in BUILD)
ENV_NAMES = frozenset(s.name for s in ENVIRONMENT)
