"""The profiles of `profile_texts` as fixtures."""

from __future__ import annotations

import pytest
from dyno.profiles import Profile, loads_profile
from profile_texts import CPU_TEXT, CUDA_TEXT


@pytest.fixture
def cuda_text() -> str:
    return CUDA_TEXT


@pytest.fixture
def cpu_text() -> str:
    return CPU_TEXT


@pytest.fixture
def cuda_profile() -> Profile:
    return loads_profile(CUDA_TEXT, "h200.yaml")


@pytest.fixture
def cpu_profile() -> Profile:
    return loads_profile(CPU_TEXT, "cpu.yaml")
