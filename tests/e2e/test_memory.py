"""Peak resident memory of a session against the total that its plan prints.

Each case runs in a process of its own, because a peak cannot be taken back. The model is dominated by its
embedding and output matrices: the hardest case, since a matrix that is repacked exists twice unless its pages
are dropped on the way.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from dyno.testing import tiny_model
from fresh_process import lacks_memory_figures, probed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(bool(lacks_memory_figures("VmHWM")), reason=lacks_memory_figures("VmHWM"))

# argv: model, settings as JSON, small model. Prints the peak after loading and after two u-batches of random
# tokens, which touch embedding rows all over the table. The peak counts from the end of the same work with a
# small model, so that modules, stacks of threads and arenas of malloc are not in it.
PROBE = """
import json, sys
import numpy as np
from dyno import _core  # with CUDA it brings cuBLAS, which counts as a module
from dyno.engine import Engine

def peak():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

def run(model):
    start = peak()
    with Engine(model, device="cpu", profile=None, **json.loads(sys.argv[2])) as engine:
        loaded = peak() - start
        tokens = np.random.default_rng(1).integers(0, engine.model["n_vocab"], engine.settings["ctx"])
        engine.logits(tokens.astype(np.int32), rows="last")
        return {"loaded": loaded, "decoded": peak() - start, "plan": dict(engine.plan)}

run(sys.argv[3])
print(json.dumps(run(sys.argv[1]), default=str))
"""


@pytest.fixture(scope="module", params=["q8_0", "q4_0-tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 190 MB, of which 140 are the two big matrices, or 80 MB of one matrix that serves as both."""
    kind, _, tied = request.param.partition("-")
    return tiny_model(
        tmp_path_factory.mktemp("memory") / f"{request.param}.gguf",
        "qwen3",
        n_layers=3,
        n_embd=1024,
        n_heads=16,
        n_kv_heads=8,
        n_ff=3072,
        n_vocab=65536 if not tied else 98304,
        n_ctx=1024,
        dtype=kind,
        tied_embeddings=bool(tied),
        vocabulary=False,
    )


def measured(model: Path, **settings: object) -> dict[str, int]:
    small = tiny_model(model.parent / "small.gguf", "qwen3", n_ctx=1024, dtype="q8_0", vocabulary=False)
    result = probed(PROBE, model, json.dumps({"ctx": 1024, "ubatch": 512, "threads": 2, **settings}), small)
    return {
        "loaded": result["loaded"],
        "decoded": result["decoded"],
        "repacked": sum(t["bytes"] for t in result["plan"]["tensors"] if t["layout"] != "plain"),
        **{name: result["plan"][f"{name}_bytes"] for name in ("weights", "kv", "arena", "scratch", "total")},
    }


@pytest.mark.parametrize("repack", [True, False])
def test_peak_stays_within_the_plan(model: Path, repack: bool) -> None:
    found = measured(model, cpu_repack=repack)
    assert found["total"] == found["weights"] + found["kv"] + found["arena"] + found["scratch"]
    assert found["loaded"] <= 1.05 * found["total"], found
    assert found["decoded"] <= 1.05 * found["total"], found
    # The measurement sees the model: without its weights no answer can have been computed.
    assert found["decoded"] >= 0.5 * found["weights"], found


def test_repacking_leaves_no_second_copy(model: Path) -> None:
    """While weights are repacked, at most a few MiB of the file's pages are resident beside the copies."""
    found = measured(model, cpu_repack=True)
    assert 0 < found["repacked"] < found["weights"]
    assert found["repacked"] <= found["loaded"] <= found["repacked"] + (16 << 20), found
