"""From entries to the runtime: groups fall back whole, rejections are told, kernels carry their origin."""

from __future__ import annotations

from pathlib import Path

import pytest
from dyno.profiles import (
    Profile,
    ProfileError,
    describe,
    diff,
    effective,
    effective_settings,
    kernel_entries,
    kernel_path,
    load_profile,
    loads_profile,
    rejections,
)

KEY = "matmul q4_0 n=4096 k=2048"


def test_everything_applies_where_nothing_is_rejected(cuda_profile: Profile) -> None:
    settings, lines = effective_settings(cuda_profile)
    assert settings == {"ubatch": 4096, "mmq_id_max_tokens": 8192}  # `default` entries are not set
    assert lines == []
    assert kernel_entries(cuda_profile) == [
        (KEY, "m1-8", {"variant": "matvec", "warps": 4, "rows": 2}, "h200.yaml:12")
    ]


def test_default_kernels_are_left_out(cpu_profile: Profile) -> None:
    assert [(tokens, config) for _, tokens, config, _ in kernel_entries(cpu_profile)] == [
        ("m1", {"variant": "dot", "rows": 4})
    ]


@pytest.mark.parametrize(
    "rejected", [["ubatch"], ["settings.ubatch"], {"ubatch": "needs 3.1 GiB, 2.0 are free"}]
)
def test_a_group_falls_back_whole(cuda_profile: Profile, rejected: list[str] | dict[str, str]) -> None:
    settings, lines = effective_settings(cuda_profile, rejected)
    assert settings == {}
    reason = rejected["ubatch"] if isinstance(rejected, dict) else "rejected"
    assert lines == [
        f"h200.yaml:8: settings.ubatch: engine default instead of 4096: {reason}",
        "h200.yaml:9: settings.mmq_id_max_tokens: engine default instead of 8192: "
        "its group g1 falls back with settings.ubatch",
    ]
    assert len(kernel_entries(cuda_profile, rejected)) == 1  # no member of the group


def test_entries_without_a_group_fall_alone(cuda_profile: Profile) -> None:
    result = effective(cuda_profile, {kernel_path(KEY, "m1-8"): "no variant"})
    assert result.settings == {"ubatch": 4096, "mmq_id_max_tokens": 8192}
    assert result.kernels == []
    assert result.lines == [
        f"h200.yaml:12: kernels.{KEY}.m1-8: engine default instead of matvec warps=4 rows=2: no variant"
    ]


def test_a_kernel_takes_the_settings_of_its_group_with_it(cuda_text: str) -> None:
    profile = loads_profile(cuda_text.replace("rows: 2,", "rows: 2, group: g1,"))
    result = effective(profile, [kernel_path(KEY, "m1-8")])
    assert (result.settings, result.kernels, len(result.lines)) == ({}, [], 3)
    result = effective(profile, ["mmq_id_max_tokens"])
    assert (result.settings, result.kernels, len(result.lines)) == ({}, [], 3)


def test_a_value_of_the_caller_wins_and_ends_the_proof_of_its_group(cuda_profile: Profile) -> None:
    settings, lines = effective_settings(cuda_profile, overrides={"ubatch": 1024})
    assert settings == {}  # the caller's own value is applied by the caller
    assert lines == [
        "h200.yaml:9: settings.mmq_id_max_tokens: engine default instead of 8192: "
        "its group g1 was measured with ubatch 4096, the caller set 1024"
    ]
    settings, lines = effective_settings(cuda_profile, overrides={"ubatch": 4096, "threads": 3})
    assert (settings, lines) == ({"mmq_id_max_tokens": 8192}, [])


def test_require_wants_every_entry(cuda_profile: Profile) -> None:
    with pytest.raises(ProfileError, match=r"cannot be used completely: settings\.ubatch: too large"):
        effective_settings(cuda_profile, {"ubatch": "too large"}, require=True)
    assert effective_settings(cuda_profile, require=True)[1] == []


def test_unknown_rejections_are_a_mistake_of_the_caller(cuda_profile: Profile) -> None:
    with pytest.raises(ValueError, match="'threads' is not an entry of the profile"):
        effective_settings(cuda_profile, ["threads"])


def test_rejections_of_a_session_report() -> None:
    report = [
        {"key": KEY, "tokens": "m1-8", "status": "rejected", "reason": "rows=2 does not divide n"},
        {"key": KEY, "tokens": "m9-16", "status": "applied", "reason": ""},
        {"key": "norm n=512", "tokens": "m1", "status": "unused", "reason": "no such op"},
    ]
    assert rejections(report) == {f"kernels.{KEY}.m1-8": "rows=2 does not divide n"}


def test_profiles_made_in_memory_are_called_by_their_label(cuda_profile: Profile) -> None:
    made = Profile.model_validate(cuda_profile.model_dump(by_alias=True))
    assert made == cuda_profile
    assert kernel_entries(made)[0][3] == cuda_profile.label


# ---- For people ----


def test_describe(cuda_profile: Profile) -> None:
    text = "\n".join(describe(cuda_profile))
    assert "cuda, compute capability 9.0, 132 SMs, 143771 MiB" in text
    assert "ubatch: 4096 (default 512), 1.64 x, group g1" in text
    assert "\n  default: " in text
    assert "cuda_graphs" in text.partition("\n  default: ")[2]
    assert f"{KEY} m1-8: matvec warps=4 rows=2, 1.06 x" in text
    assert "memory" not in text
    assert cuda_profile.evidence is not None
    smaller = cuda_profile.evidence.model_copy(update={"objective": "memory", "memory_mib": [900.5, 600]})
    lines = describe(cuda_profile.model_copy(update={"evidence": smaller}))
    assert lines[lines.index("  objective: memory") + 1] == "  memory: 600 MiB (default 900.5 MiB)"
    bare = cuda_profile.model_copy(update={"settings": {"ubatch": "default"}, "kernels": {}})
    assert "every entry is the engine's default" in "\n".join(describe(bare))


def test_describe_shows_small_shares_as_such(cuda_profile: Profile) -> None:
    """A type of one router rounds to nothing, though the model has it."""
    model = cuda_profile.match.model.model_copy(
        update={"types": {"Q4_0": 0.9, "Q6_K": 0.0999, "BF16": 0.0001}}
    )
    match = cuda_profile.match.model_copy(update={"model": model})
    text = "\n".join(describe(cuda_profile.model_copy(update={"match": match})))
    assert "Q4_0 90% Q6_K 10% BF16 <1%" in text


def test_describe_shows_gains_first_and_defaults_last() -> None:
    shipped = Path(__file__).parents[2] / "profiles/xeon-avx512-vnni-2c-pycode-moe-20m-q4_k_m.yaml"
    lines = describe(load_profile(shipped))
    starts = [line.split()[0] for line in lines]
    assert lines[4].startswith("  gain pp512: ")
    assert starts[-2:] == ["default:", "default:"]
    assert lines[-2] == "  default: ubatch, threads, threads_batch, cpu_repack"
    assert lines[-1].endswith(" kernels")
    assert starts.count("default:") == 2
    assert sum(" x, group kernels_tg" in line for line in lines) == 6


def test_diff_tells_what_changed_and_nothing_else(cuda_profile: Profile, cuda_text: str) -> None:
    assert diff(cuda_profile, cuda_profile) == []
    text = cuda_text.replace("value: 4096", "value: 2048").replace("cuda_graphs:  ", "fusion:  ")
    text = text.replace("rows: 2", "rows: 4").replace("ops_revision: 7", "ops_revision: 8")
    assert [str(change) for change in diff(cuda_profile, loads_profile(text))] == [
        "match.engine.ops_revision: 7 -> 8",
        "settings.ubatch: 4096 (default 512), 1.64 x, group g1 -> 2048 (default 512), 1.64 x, group g1",
        "settings.fusion: (none) -> default",
        "settings.cuda_graphs: default -> (none)",
        f"kernels.{KEY}.m1-8: matvec warps=4 rows=2, 1.06 x -> matvec warps=4 rows=4, 1.06 x",
    ]
