"""Launches every kernel variant a few times on odd shapes: what compute-sanitizer is given to look at.

    compute-sanitizer --tool memcheck  python tests/cuda/sanitize.py
    compute-sanitizer --tool racecheck python tests/cuda/sanitize.py
    compute-sanitizer --tool initcheck --kernel-name-exclude kernel_substring=finish_sums_kernel \\
        python tests/cuda/sanitize.py

On Hopper initcheck does not see what cuBLAS stores (of PyTorch's products neither), so it calls the sums
uninitialised that this kernel reads.

Shapes and data are those of the contract suite (tests/ops); what an op gives is checked there, here only that
no launch fails and that guard bytes stand. With --models, tiny models are also run whole: prompts, tokens and
captured graphs, with and without the settings that change what is launched, and with a cache
of experts that adapts.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from dyno import _core  # noqa: E402
from ops.cases import all_cases  # noqa: E402
from ops.harness import launch  # noqa: E402

if TYPE_CHECKING:
    from ops.harness import Case

TYPES = (None, "f16", "q4_0", "q8_0", "q4_k", "mxfp4", "q8_16", "q4_16")
"""Weight types that stand for the others: halves, scales, bytes, sub-blocks with mins, a codebook,
float factors, a table."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"fusion": False, "graph_concurrency": True},
    {"fusion": False, "flash_attention": False, "mmq_max_tokens": 0, "mmq_id_max_tokens": 0},
)


def selection(device: dict[str, Any], all_types: bool) -> list[tuple[Case, dict[str, Any]]]:
    """One odd shape for each family, variant and weight type, of sample for each way to draw; with the first
    and the last configuration."""
    found: dict[tuple[Any, ...], tuple[Case, list[dict[str, Any]]]] = {}
    for case in all_cases():
        dtype = case.desc.get("type") if "k" in case.desc else None
        if not all_types and dtype not in TYPES:
            continue
        by_variant: dict[str, list[dict[str, Any]]] = {}
        for config in _core.ops.candidates(case.family, case.desc, device):
            by_variant.setdefault(config["variant"], []).append(config)
        for variant, configs in by_variant.items():
            # The launches of a draw depend on the settings alone.
            settings = case.label if case.family == "sample" and case.desc["n_vocab"] < 10_000 else ""
            # Heads beyond 256 have kernels of their own, and linear attention one for each range of heads.
            width = case.desc.get("dk", 0) if case.family.endswith("attention") else 0
            heads = sum(width > limit for limit in (64, 128, 256))
            tiles = any(case.desc.get(name, 0) > 0 for name in ("x_tiles", "y_tiles", "out_tiles"))
            kind = (tiles, bool(case.desc.get("selected")), bool(case.desc.get("centred")))
            key = (case.family, variant, dtype, case.desc.get("k_type"), settings, heads, *kind)
            known = found.get(key)
            # Most tokens: a chunk or a tile of several tokens is not reached with one.
            if known is None or known[0].desc["m"] < case.desc["m"] <= 80:
                found[key] = (case, configs)
    out = []
    for case, configs in found.values():
        out += [(case, config) for config in (configs if len(configs) == 1 else (configs[0], configs[-1]))]
    return out


def run_models(device: str) -> int:
    """Tiny models from prompt to replayed tokens; returns how many."""
    import dyno

    models = sorted((TESTS / "data" / "tiny").glob("*-tiny.gguf"))
    for model in models:
        with dyno.Engine(model, device=device, profile=None, ctx=128, ubatch=64) as engine:
            for settings in SETTINGS:
                engine.set(**settings)
                engine.reset()
                engine.logits(list(range(1, 71)))
                for token in range(4):
                    engine.logits([token], reset=False)
                engine.diagnostics.greedy_after(list(range(1, 6)))
                engine.reset()
                for filters in ({"top_k": 20}, {"top_p": 0.8}):
                    prompt = np.arange(1, 6, dtype=np.int32)
                    drawing = engine._session.generation(prompt, temperature=0.9, **filters)
                    drawing.queue(np.full(4, 0.6, np.float32))
                    for _ in range(4):
                        drawing.next()
    run_swaps(device, cuda_graphs=False)
    run_swaps(device)
    return len(models)


def run_swaps(device: str, **settings: Any) -> None:
    """Three texts of one word each, whose experts come to the cache of a GPU while tokens run."""
    import dyno

    for name in ("qwen3moe", "gpt-oss"):
        with dyno.Engine(
            TESTS / "data" / "tiny" / f"{name}-tiny.gguf", device=device, profile=None, ctx=64, ubatch=16,
            cpu_moe=True, expert_cache_mib=1, expert_cache="adaptive", offload_min_tokens=1,
            **settings,
        ) as engine:  # fmt: skip
            for word in (7, 90, 200):
                engine.reset()
                engine.logits([word] * 24)
                for _ in range(10):
                    engine.logits([word], reset=False)
            assert engine.expert_choices["swapped"] > 0


def main() -> None:
    """The command line; whatever fails is an exception here or said by compute-sanitizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--all-types", action="store_true", help="every weight type, not a few")
    parser.add_argument("--families", nargs="*", help="only these op families")
    parser.add_argument("--models", action="store_true", help="also run tiny models of every architecture")
    parser.add_argument("--list", action="store_true", help="say what would be launched")
    given = parser.parse_args()
    gpus = [d for d in _core.devices() if d["kind"] == "cuda"]
    ordinal = int(given.device.partition(":")[2] or 0)
    if ordinal >= len(gpus):
        parser.error(f"no {given.device}: {_core.no_cuda_reason() or 'fewer GPUs'}")
    device = {key: value for key, value in gpus[ordinal].items() if key != "ordinal"}
    count = 0
    for case, config in selection(device, given.all_types):
        if given.families and case.family not in given.families:
            continue
        print(f"{case.family} {case.id} {config}", flush=True)
        if not given.list:
            args, outputs, _ = case.make(np.random.default_rng(zlib.crc32(case.id.encode())))
            launch(case, config, args, outputs, device=given.device)
        count += 1
    models = run_models(given.device) if given.models and not given.list else 0
    print(f"{count} launches of single ops, {models} models")


if __name__ == "__main__":
    main()
