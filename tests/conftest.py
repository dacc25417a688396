"""Fixtures shared by all tests: oracle models under tests/data, larger ones from `pytest --models DIR`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from dyno import _core

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Without the tests of a GPU, `auto` means the CPU: what the others compare with is computed there.

    A shell starts what runs in the background with Ctrl-C ignored; the tests of Ctrl-C need it."""
    if "not gpu" in str(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models",
        type=Path,
        default=None,
        metavar="DIR",
        help="a folder of larger oracle models (trained/*.gguf, tiny/*.gguf with their logits)",
    )


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test that holds on any: a test of a GPU too, which is skipped where there is none."""
    name = str(request.param)
    if name != "cpu" and not any(
        d["kind"] == "cuda" and not _core.device_problem(d) for d in _core.devices()
    ):
        pytest.skip(f"no GPU: {_core.no_cuda_reason()}")
    return name


@pytest.fixture(scope="session")
def models_dir(request: pytest.FixtureRequest) -> Path:
    """The folder given with --models; tests that need it are skipped without."""
    folder: Path | None = request.config.getoption("--models")
    if folder is None:
        pytest.skip("needs --models DIR")
    if not folder.is_dir():
        pytest.fail(f"--models {folder}: no such folder")
    return folder


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """Tiny random models of every architecture with logits of the public reference implementation."""
    return DATA / "tiny"


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """The really trained model that the project ships."""
    return ROOT / "models" / "pycode-moe-20m-Q4_K_M.gguf"


@pytest.fixture(scope="session")
def eval_text() -> Path:
    """Held-out text for the trained model."""
    return DATA / "eval.txt"
