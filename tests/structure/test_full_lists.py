"""The lists that pages promise in full: families, variants of products, CUDA switches, knobs,
architectures, weight types, metrics, fields of requests, and the pages themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dyno import _core
from dyno.server import bodies, messages_body
from dyno_tuner.space.knobs import KNOBS

ROOT = Path(__file__).resolve().parents[2]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def families() -> list[str]:
    found = re.findall(r"^DYNO_OP_FAMILY\((\w+),", read("csrc/ops/families.def"), re.MULTILINE)
    assert found == _core.ops.families()
    return found


def product_variants() -> set[str]:
    """CUDA variants of the families whose kernels are in csrc/ops/matmul/cuda."""
    text = "".join(
        read(f"csrc/ops/{family}/variants.def")
        for family in ("matmul", "matmul_id", "up_gate", "moe_up_gate")
    )
    return set(re.findall(r"^DYNO_VARIANT\((\w+), cuda,", text, re.MULTILINE))


def switches() -> list[str]:
    found = re.search(r"set\(_cuda_switches\s+(.*?)\)", read("csrc/cmake/Cuda.cmake"), re.DOTALL)
    assert found
    return [name for name in found[1].split() if name != "GGML_CUDA_IQK_FORCE_BF16"]  # an alias


@pytest.mark.parametrize("family", families())
def test_architecture_names_every_family(family: str) -> None:
    assert f"`{family}`" in read("docs/explain/architecture.md")


@pytest.mark.parametrize("variant", sorted(product_variants()))
def test_cuda_products_has_a_row_for_every_variant(variant: str) -> None:
    assert f"\n| `{variant}` |" in read("docs/explain/kernels.md")


@pytest.mark.parametrize("switch", switches())
def test_cuda_build_has_a_section_for_every_switch(switch: str) -> None:
    assert f"\n## `{switch}`\n" in read("docs/user/cuda-build.md")


@pytest.mark.parametrize("knob", [spec.name for spec in KNOBS])
def test_the_tuning_guide_names_every_knob(knob: str) -> None:
    assert f"`{knob}`" in read("docs/user/knobs.md")


@pytest.mark.parametrize("architecture", _core.architectures())
def test_the_status_page_names_every_architecture(architecture: str) -> None:
    assert f"`{architecture}`" in read("docs/user/status.md")


def test_the_status_page_names_every_weight_type() -> None:
    rows = re.findall(r"^\| ([^|`]+) \|", read("docs/user/status.md"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", row)}
    lines = r"^DYNO_(?:FLOAT|QUANT|CODED|VALUES)_TYPE\((\w+),"
    types = re.findall(lines, read("csrc/core/weight_types.def"), re.MULTILINE)
    # The rows of two interleaved types are types of their own inside the engine only.
    assert {t.upper() for t in types if not t.endswith("_row")} <= named


def test_the_api_page_names_every_metric() -> None:
    names = set(re.findall(r'"((?:vllm:|dyno_)[a-z0-9_]+)"', read("python/dyno/server/metrics.py")))
    assert len(names) > 25
    page = read("docs/user/serving-api.md")
    assert [n for n in sorted(names) if not re.search(rf"`{n}(?:_total|_info)?[`{{]", page)] == []


@pytest.mark.parametrize("kind", ["ChatBody", "CompletionBody", "EmbeddingBody", "MessagesBody"])
def test_the_api_page_names_every_field_of_a_request(kind: str) -> None:
    body = getattr(messages_body if kind == "MessagesBody" else bodies, kind)
    page = read("docs/user/serving-api.md")
    assert len(body.model_fields) > 5
    assert [n for n in body.model_fields if not re.search(rf"[`.]{n}\b", page)] == []


def test_the_readme_links_every_page() -> None:
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*/*.md")}
    assert pages <= set(re.findall(r"\]\(([^)#]+)", read("README.md")))
