"""Flags that an engine or tool has removed or never had, and their substitutes."""

from __future__ import annotations

from dataclasses import dataclass

from .line import BENCH, BOTH_TOOLS, COMMON, IK, MAIN

_C, _B = (COMMON,), (BENCH,)


@dataclass(frozen=True)
class Gone:
    """A flag that an engine or tool has removed or never had."""

    names: tuple[str, ...]
    engine: str
    tools: tuple[str, ...]
    takes: bool
    removed: bool  # True: it existed before; False: it never did
    text: str
    since: str | None = None  # date; None: unknown, but before the commit of the tables
    value: str | None = None  # only with this value


_ANY = BOTH_TOOLS
GONE: tuple[Gone, ...] = (
    Gone(("-fmoe", "--fused-moe"), IK, _C, False, True, "removed in 41d6c42b9 (PR 863): fused MoE is on by "
        "default, and the tools reject the flag. Leave it out; -no-fmoe turns it off, and llama-bench still "
        "takes -fmoe 0|1"),
    Gone(("-sm", "--split-mode"), IK, _ANY, True, True,
        "split mode row was removed in a71934998 (2025-12-01); use layer or graph", "2025-12-01", "row"),
    Gone(("-rcache", "--rope-cache"), IK, _C, False, True, "no longer supported"),
    Gone(("-fdn", "--fused-delta-net"), IK, _C, True, True, "deprecated"),
    Gone(("-ncmoe",), IK, _B, True, False, "llama-bench has only the long name, --n-cpu-moe"),
    Gone(("-op", "--offload-policy"), IK, _B, True, False,
        "llama-bench does not take it; llama-sweep-bench does"),
    Gone(("--version",), IK, _B, False, False, "llama-bench has no --version; its JSON has the key "
        "build_commit"),
    Gone(("-d", "--n-depth"), IK, _B, True, False, "the llama-bench of ik_llama.cpp has no depth; use -gp "
        "pp,tg"),
    Gone(("-no-mmad",), IK, _B, False, False, "llama-bench does not take it"),
    Gone(("--no-op-offload",), IK, _ANY, False, False, "a flag of llama.cpp; in ik_llama.cpp, use -op -1,0"),
    Gone(("-nopo",), IK, _B, True, False,
        "a flag of llama.cpp; in ik_llama.cpp, use -cuda offload-batch-size=N with a large N"),
    Gone(("-mmp", "--mmap"), MAIN, _B, True, True, "replaced by -lm none|mmap|…"),
    Gone(("--mmap",), MAIN, _C, False, True, "replaced by -lm mmap; the default maps the file, too"),
    Gone(("-dio", "--direct-io"), MAIN, _C, False, True, "replaced by -lm dio"),
    Gone(("-ndio", "--no-direct-io"), MAIN, _C, False, True, "removed: only -lm dio uses direct I/O"),
    Gone(("--tensor-read-lazy",), MAIN, _C, True, True, "renamed to -lzm"),
    Gone(("--no-mmap",), MAIN, _ANY, False, True, "replaced by -lm none"),
    Gone(("--mlock",), MAIN, _C, False, True, "replaced by -lm mlock"),
    Gone(("-tb", "--threads-batch"), MAIN, _B, True, False, "llama-bench has only -t"),
    Gone(("-op", "--offload-policy"), MAIN, _ANY, True, False, "a flag of ik_llama.cpp; in llama.cpp, use "
        "--no-op-offload (llama-bench: -nopo 1), and GGML_OP_OFFLOAD_MIN_BATCH for the threshold"),
    Gone(("-cuda", "--cuda-params"), MAIN, _ANY, True, False, "a flag of ik_llama.cpp; llama.cpp reads "
        "environment variables (GGML_CUDA_DISABLE_GRAPHS, GGML_CUDA_DISABLE_FUSION, "
        "GGML_OP_OFFLOAD_MIN_BATCH)"),
    Gone(("-rtr", "--run-time-repack"), MAIN, _ANY, False, False,
        "a flag of ik_llama.cpp; llama.cpp has --repack, which is on by default"),
    Gone(("--draft", "--draft-n", "--draft-max"), MAIN, _C, True, True,
        "removed: use --spec-draft-n-max, or --spec-ngram-mod-n-max for n-grams"),
    Gone(("--draft-min", "--draft-n-min"), MAIN, _C, True, True,
        "removed: use --spec-draft-n-min, or --spec-ngram-mod-n-min for n-grams"),
    Gone(("--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-min-hits"), MAIN, _C, True, True,
        "removed: each kind of n-gram has a flag of its own, such as --spec-ngram-simple-size-n"),
    Gone(("--cuda-graph-opt",), MAIN, _ANY, False, False,
        "there is no such flag; set the environment variable GGML_CUDA_GRAPH_OPT=1"),
    Gone(("--cuda-graph-opt",), IK, _ANY, False, False,
        "there is no such flag, and ik_llama.cpp has no counterpart of GGML_CUDA_GRAPH_OPT=1"),
)  # fmt: skip


def find_gone(name: str, engine: str, tool: str, value: str | None = None) -> Gone | None:
    """The row about a missing flag (with this value)."""
    return next(
        (
            g
            for g in GONE
            if g.engine == engine and tool in g.tools and name in g.names and g.value in (None, value)
        ),
        None,
    )
