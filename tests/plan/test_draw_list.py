"""Drawing a token stands in the plan of a GPU like any other op; planned, not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dyno import _core
from dyno.testing import tiny_model

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
CONFIG = {"variant": "blocks", "blocks": 16}


def plan_for(
    name: str = "llama", device: dict[str, Any] | None = HOPPER, kernels: Any = (), **load: Any
) -> _core.Session:
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        load=load,
        session={"cuda_graphs": False},
        kernels=list(kernels),
        plan_only=True,
        device=device,
    )


def drawing(session: _core.Session, tokens: int | None = 1) -> list[dict[str, Any]]:
    return [op for op in session.ops(tokens) if op["family"] == "sample"]


@pytest.mark.parametrize("numerics", ["default", "exact"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_generation_draws_once(name: str, numerics: str) -> None:
    session = plan_for(name, numerics=numerics)
    (op,) = drawing(session)
    assert op["key"] == f"sample n_vocab={session.model['n_vocab']}"
    assert (op["list"], op["count"], op["rows"], op["tokens"]) == ("draw", 1, 1, "m1")
    assert (op["reason"], op["path"]) == ("default heuristic", "any")
    assert op["bytes"] == 4 * session.model["n_vocab"]
    assert drawing(session, 2) == []
    assert drawing(session, None) == [op]
    family, desc = _core.ops.parse_key(op["key"], op["rows"])
    legal = _core.ops.candidates(family, desc, HOPPER, "legal")
    assert op["config"] in legal
    assert len(legal) > 1
    assert "1 op per drawn token" in session.describe_plan()


@pytest.mark.parametrize("ubatch", [64, 1])
def test_the_workspace_holds_what_a_draw_leaves_in_it(ubatch: int, tmp_path: Path) -> None:
    """Where the vocabulary is large, that is more than any product of so small a model needs."""
    n_vocab = 151_936
    path = tiny_model(tmp_path / "m.gguf", n_vocab=n_vocab, n_layers=1, n_ctx=64, vocabulary=False)
    session = _core.Session(
        path, context={"ctx": 64}, session={"cuda_graphs": False}, plan_only=True, device=HOPPER
    )
    session.set({"ubatch": ubatch})
    chunks = -(-n_vocab // 128)
    blocks = drawing(session)[0]["config"]["blocks"]
    # Of each block its best, of each chunk a sum and its best, and of each logit, because top-p alone sorts
    # the row, a key and two sums.
    assert session.plan["scratch_bytes"] >= 8 * blocks + 12 * chunks + 20 * n_vocab


def test_on_the_cpu_the_session_draws() -> None:
    session = plan_for(device=None)
    assert drawing(session, None) == []
    assert "drawn token" not in session.describe_plan()


@pytest.mark.parametrize("tokens", ["m1", "m1-8", "m1+"])
def test_a_profile_chooses_how(tokens: str) -> None:
    key = drawing(plan_for())[0]["key"]
    assert drawing(plan_for())[0]["config"] != CONFIG
    session = plan_for(kernels=[(key, tokens, CONFIG, "p.yaml:7")])
    assert drawing(session)[0]["config"] == CONFIG
    assert drawing(session)[0]["reason"] == "profile: p.yaml:7"
    assert [row["status"] for row in session.kernel_report()] == ["applied"]
    session.set_kernels([])
    assert drawing(session) == drawing(plan_for())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"variant": "blocks", "blocks": 17}, "17"),
        ({"variant": "heap", "grain": 64}, "heap"),
        ({"variant": "cards"}, "cards"),
    ],
)
def test_a_config_that_cannot_be_falls_back(config: dict[str, Any], said: str) -> None:
    key = drawing(plan_for())[0]["key"]
    session = plan_for(kernels=[(key, "m1", config, "p.yaml:7")])
    (report,) = session.kernel_report()
    assert report["status"] == "rejected"
    assert said in report["reason"]
    (op,) = drawing(session)
    assert op["config"] == drawing(plan_for())[0]["config"]
    assert op["reason"] == f"fallback: {report['reason']}"


@pytest.mark.parametrize(
    ("family", "tokens", "most"), [("sample", "m2-4", "1 row"), ("qkv", "m9-16", "8 rows")]
)
def test_an_entry_for_more_tokens_than_an_op_ever_has_is_unused(family: str, tokens: str, most: str) -> None:
    op = next(op for op in plan_for("qwen3moe").ops(1) if op["family"] == family)
    session = plan_for("qwen3moe", kernels=[(op["key"], tokens, op["config"], "p.yaml:7")])
    (report,) = session.kernel_report()
    assert report["status"] == "unused"
    assert report["reason"] == f"p.yaml:7: this op never has more than {most}"
