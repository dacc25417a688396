"""Profiles beside the compiled engine: the same token ranges; kernels are judged by the op families."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _selection, settings
from dyno.errors import ProfileError
from dyno.profiles import check_file, has_errors
from dyno.profiles._fields import parse_tokens
from dyno.profiles.io import dumps_profile, load_profile, loads_profile
from profile_texts import CPU_TEXT

if TYPE_CHECKING:
    from dyno.profiles import Profile

_core: Any = pytest.importorskip("dyno._core", reason="needs the compiled engine")
ops: Any = _core.ops

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
DEVICE = {"kind": "cpu", "isa": "avx512_vnni", "cores": 2, "memory_bytes": 8 << 30}
NORM = {"n": 512}
KEY = ops.op_key("norm", NORM)


def range_or_none(text: str) -> tuple[int, int] | None:
    try:
        return parse_tokens(text)
    except ValueError:
        return None


def test_token_ranges_are_those_of_the_engine() -> None:
    ends = [*range(70), 127, 128, 129, 65536, 2**31 - 1, 2**31, 2**31 + 1, 2**32]
    texts = [f"m{low}{end}" for low in ends for end in ("", "+", *(f"-{high}" for high in ends))]
    texts += ["", "m", "m+", "1-8", "m1-", "m01", "m1-08", "m 1", "m1-8+", "M1", "m1-8 "]
    for text in texts:
        theirs = ops.parse_tokens(text)
        assert range_or_none(text) == (tuple(theirs) if theirs else None), text


def profile_with(tmp_path: Path, key: str, tokens: str, entry: str) -> Path:
    text = CPU_TEXT[: CPU_TEXT.index("kernels:")] + f'kernels:\n  "{key}": {{{tokens}: {entry}}}\n'
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return path


def test_every_candidate_of_an_op_passes_the_check(tmp_path: Path) -> None:
    candidates = ops.candidates("norm", {**NORM, "m": 1}, DEVICE)
    assert candidates
    for config in candidates:
        entry = "{" + ", ".join(f"{name}: {value}" for name, value in config.items()) + "}"
        problems = check_file(profile_with(tmp_path, KEY, "m1", entry))
        assert problems == [], [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("key", "entry", "words"),
    [
        (KEY, "{variant: no_such_variant}", "no_such_variant"),
        (KEY, "{variant: rows, no_such_parameter: 3}", "no_such_parameter"),
        ("nrm n=512", "default", "did you mean 'norm'?"),
        ("norm", "default", "norm"),
    ],
)
def test_what_the_engine_refuses_is_an_error_with_its_reason(
    tmp_path: Path, key: str, entry: str, words: str
) -> None:
    problems = check_file(profile_with(tmp_path, key, "m1", entry))
    assert has_errors(problems)
    assert words in problems[0].message
    assert problems[0].line == 12


def test_settings_that_the_engine_lacks_fall_back_loudly_with_their_group(
    cuda_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of another version: what it turned here does nothing, and is not passed over in silence."""
    monkeypatch.setattr(settings, "engine_defaults", lambda: {"ubatch": 512, "cuda_graphs": True})
    path = str(TINY / "qwen3moe-tiny.gguf")
    device = {"kind": "cuda", "memory_bytes": 143771 << 20, "compute_capability": 90, "sm_count": 132}
    model = _core.describe_model(path)
    with pytest.raises(ProfileError, match="belongs to another model"):
        _selection.select(path, model, cuda_profile, {}, device, require=False)
    found = _selection.select(path, model, cuda_profile, {}, device, require=False, force=True)
    assert found.match.profile is cuda_profile
    assert found.settings == {}  # ubatch was measured with it
    told = "\n".join(found.lines)
    assert "settings.mmq_id_max_tokens: engine default instead of 8192" in told
    assert "'mmq_id_max_tokens' does not exist in this version of dyno" in told
    assert "settings.ubatch: engine default instead of 4096: its group g1 falls back" in told
    with pytest.raises(ProfileError, match="required"):
        _selection.select(path, model, cuda_profile, {}, device, require=True, force=True)


def test_a_profile_carries_the_settings_of_a_scheduler(tmp_path: Path) -> None:
    given = "settings:\n  step_tokens: {value: 64}\n  spec: {value: ngram}\n  spec_min_p: {value: 0.25}\n"
    path = tmp_path / "p.yaml"
    path.write_text(CPU_TEXT[: CPU_TEXT.index("settings:")] + given)
    assert not has_errors(check_file(path))
    profile = load_profile(path)
    assert {name: entry.value for name, entry in profile.settings.items()} == {
        "step_tokens": 64,
        "spec": "ngram",
        "spec_min_p": 0.25,
    }
    assert loads_profile(dumps_profile(profile)).settings == profile.settings
    for wrong, words in (("1.5", "from 0 to 1"), ("true", "must be a number"), (".nan", "finite")):
        text = CPU_TEXT[: CPU_TEXT.index("settings:")] + given.replace("0.25", wrong)
        with pytest.raises(ProfileError, match=words):
            loads_profile(text)
