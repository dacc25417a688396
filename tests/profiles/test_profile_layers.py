"""Finding: level before layer, whole files, named files, broken files, `require`, and the printed chain."""

from __future__ import annotations

import logging
import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest
from dyno._home import home
from dyno.profiles import (
    CudaDevice,
    EngineIdentity,
    Layer,
    Level,
    MatchResult,
    ModelIdentity,
    Profile,
    ProfileError,
    default_layers,
    default_path,
    find_profile,
    list_profiles,
    load_profile,
    save_profile,
    shipped_folder,
    user_folder,
)

DEVICE = CudaDevice(
    compute_capability="9.0",
    sm_count=132,
    memory_mib=143771,
    memory_gbps=4310.0,
    pcie_gbps=54.0,
    power_limit_w=700.0,
)
MODEL = ModelIdentity(
    architecture="qwen3moe",
    layers=48,
    embedding=2048,
    experts=128,
    experts_used=8,
    types={"Q4_0": 0.93, "Q6_K": 0.07},
)
ENGINE = EngineIdentity(version="0.3.0", ops_revision=7)


def variant(profile: Profile, label: str, **device: Any) -> Profile:
    """The profile with another label and another device."""
    data = profile.model_dump(by_alias=True)
    data["label"] = label
    data["match"]["device"] |= device
    return Profile.model_validate(data)


class Folders:
    """Three layers in temporary folders."""

    def __init__(self, root: Path) -> None:
        self.layers = [Layer(name, root / name) for name in ("shipped", "site", "user")]

    def put(self, layer: str, name: str, profile: Profile) -> str:
        folder = next(item.folder for item in self.layers if item.name == layer)
        save_profile(profile, folder / name)
        return str(folder / name)

    def write(self, layer: str, name: str, text: str) -> str:
        folder = next(item.folder for item in self.layers if item.name == layer)
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return str(folder / name)

    def find(self, **options: Any) -> MatchResult:
        warnings: list[str] = []
        options = {"layers": self.layers, "warn": warnings.append} | options
        result = find_profile(DEVICE, MODEL, ENGINE, **options)
        assert result.warnings == warnings
        return result


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


EXACT: dict[str, Any] = {}
SAME: dict[str, Any] = {"power_limit_w": 350.0}
NEAR: dict[str, Any] = {"sm_count": 114}


@pytest.mark.parametrize(
    ("shipped", "site", "user", "layer", "level"),
    [
        (EXACT, EXACT, EXACT, "user", Level.EXACT),
        (EXACT, EXACT, None, "site", Level.EXACT),
        (EXACT, None, None, "shipped", Level.EXACT),
        (EXACT, SAME, NEAR, "shipped", Level.EXACT),
        (NEAR, EXACT, SAME, "site", Level.EXACT),
        (SAME, NEAR, NEAR, "shipped", Level.SAME_DEVICE),
        (SAME, SAME, NEAR, "site", Level.SAME_DEVICE),
        (NEAR, NEAR, NEAR, "user", Level.NEAREST),
        (None, NEAR, None, "site", Level.NEAREST),
    ],
)
def test_the_level_wins_then_the_layer(
    folders: Folders,
    cuda_profile: Profile,
    shipped: dict[str, Any] | None,
    site: dict[str, Any] | None,
    user: dict[str, Any] | None,
    layer: str,
    level: Level,
) -> None:
    for name, device in (("shipped", shipped), ("site", site), ("user", user)):
        if device is not None:
            folders.put(name, "p.yaml", variant(cuda_profile, name, **device))
    result = folders.find()
    assert (result.layer, result.level) == (layer, level)
    assert result.profile is not None
    assert result.profile.label == layer  # one whole file


def test_the_chain_says_what_was_tried(folders: Folders, cuda_profile: Profile) -> None:
    path = folders.put("user", "p.yaml", cuda_profile)
    result = folders.find()
    assert result.headline == "profile: p.yaml (exact match)"  # one short line; the chain has the path
    assert result.chain == [f"exact match: {path} (user)"]

    folders.put("user", "p.yaml", variant(cuda_profile, "slower", **NEAR))
    result = folders.find()
    assert result.headline == "profile: p.yaml (nearest device; differs: SMs 114, here 132)"
    assert result.chain[0] == f"exact match: none (best is {path}: SMs 114, here 132)"
    assert result.chain[1] == "same compute capability and SM count: none"
    assert result.chain[2].startswith(f"nearest device: {path} (user, score 0.")


def test_if_several_properties_differ_the_line_has_their_names(
    folders: Folders, cuda_profile: Profile
) -> None:
    path = folders.put("user", "p.yaml", variant(cuda_profile, "x", power_limit_w=350.0, memory_mib=80000))
    result = folders.find()
    how = "same compute capability and SM count"
    assert result.headline == f"profile: p.yaml ({how}; differs: memory, power limit)"
    assert result.reasons == ["memory 80000 MiB, here 143771 MiB", "power limit 350 W, here 700 W"]
    assert result.chain[0] == f"exact match: none (best is {path}: {'; '.join(result.reasons)})"


def forced_without_gain(profile: Profile) -> Profile:
    """As `tune --force` writes it if nothing gains: every setting is `default`, and others disturbed."""
    data = profile.model_dump(by_alias=True)
    data["settings"], data["kernels"] = dict.fromkeys(data["settings"], "default"), {}
    data["evidence"]["environment"] = {"disturbed": True}
    return Profile.model_validate(data)


@pytest.mark.parametrize("proven", [EXACT, SAME, NEAR])
def test_a_disturbed_profile_without_a_gain_hides_no_proven_one(
    folders: Folders, cuda_profile: Profile, proven: dict[str, Any]
) -> None:
    forced = forced_without_gain(cuda_profile)
    path = folders.put("user", "mine.yaml", forced)
    assert folders.find().path == path, "there is nothing else"
    folders.put("shipped", "quiet.yaml", variant(cuda_profile, "quiet", **proven))
    result = folders.find()
    assert result.profile is not None
    assert result.profile.label == "quiet"
    assert any(line.startswith(f"passed over: {path} ") for line in result.chain)
    assert folders.find(profile=path).path == path, "the caller has named it"
    assert folders.find(require=True).path == (path if proven else result.path), "an exact one is required"


def test_a_profile_of_a_quiet_machine_or_with_a_gain_goes_first(
    folders: Folders, cuda_profile: Profile
) -> None:
    folders.put("shipped", "near.yaml", variant(cuda_profile, "near", **NEAR))
    data = forced_without_gain(cuda_profile).model_dump(by_alias=True)
    quiet = {**data, "evidence": {**data["evidence"], "environment": None}}
    gain = {**data, "settings": cuda_profile.model_dump(by_alias=True)["settings"]}
    for mine in (quiet, gain):
        path = folders.put("user", "mine.yaml", Profile.model_validate(mine))
        assert folders.find().path == path
    # A farther profile without a proven gain is no better either.
    path = folders.put("user", "mine.yaml", Profile.model_validate(data))
    folders.put("shipped", "near.yaml", variant(forced_without_gain(cuda_profile), "near", **NEAR))
    assert folders.find().path == path


def test_nothing_found_is_the_engine_default(folders: Folders, cpu_profile: Profile) -> None:
    result = folders.find()
    assert (result.profile, result.level) == (None, Level.DEFAULT)
    assert result.headline == "profile: none for this model and device"
    assert result.chain == [
        "exact match: none (no profiles found)",
        "same compute capability and SM count: none",
        "nearest device: none",
        "engine default",
    ]
    folders.put("user", "cpu.yaml", cpu_profile)
    result = folders.find()
    assert result.level is Level.DEFAULT
    assert result.chain[0] == "exact match: none (none of 1 profiles is for this kind of device and engine)"


def test_what_is_too_far_away_is_not_taken_unless_named(folders: Folders, cuda_profile: Profile) -> None:
    far = variant(cuda_profile, "old", compute_capability="5.2", sm_count=8, memory_gbps=80.0, pcie_gbps=3.0)
    path = folders.put("user", "old.yaml", far)
    result = folders.find()
    assert result.level is Level.DEFAULT
    assert f"nearest device: none (best is {path} with score 0." in result.chain[2]
    assert folders.find(profile=path).level is Level.NEAREST


OTHER_MODELS: dict[str, dict[str, Any]] = {
    "architecture llama, here qwen3moe": {"architecture": "llama"},
    "layers 47, here 48": {"layers": 47},
    "experts 64, here 128": {"experts": 64},
    "share of Q8_0 1.00, here 0.00": {"types": {"Q8_0": 1.0}},
}


def test_few_differences_of_another_model_are_listed(folders: Folders, cuda_profile: Profile) -> None:
    sizes = {"layers": 2, "embedding": 64, "experts": 3, "experts_used": 1, "heads": 2, "vocab": 9}
    folders.put("user", "other.yaml", of_another_model(cuda_profile, **sizes, types={"Q8_0": 1.0}))
    first = folders.find().chain[0]
    assert first.count(", here ") == 5, first
    assert first.startswith("exact match: none (best is ")
    assert re.search(r"; and \d more\)$", first), first


def of_another_model(profile: Profile, **model: Any) -> Profile:
    data = profile.model_dump(by_alias=True)
    data["match"]["model"] |= model
    return Profile.model_validate(data)


@pytest.mark.parametrize("difference", OTHER_MODELS)
def test_the_profile_of_another_model_is_never_taken_by_itself(
    folders: Folders, cuda_profile: Profile, difference: str
) -> None:
    other = of_another_model(cuda_profile, **OTHER_MODELS[difference])
    path = folders.put("user", "other.yaml", other)
    result = folders.find()
    assert (result.profile, result.level) == (None, Level.DEFAULT)
    assert result.headline == "profile: none for this model and device"
    assert "profiles of other models: 1; they are used only if forced" in result.chain

    # Nobody reads the differences of two models that have nothing in common.
    assert ("best is" in result.chain[0]) == (not difference.startswith("architecture")), result.chain[0]

    with pytest.raises(ProfileError, match=f"belongs to another model: .*{difference}") as error:
        folders.find(profile=path)
    assert path in str(error.value)
    assert "--force-profile" in str(error.value)

    forced = folders.find(profile=path, any_model=True)
    assert (forced.path, forced.level) == (path, Level.OTHER_MODEL)
    assert "another model, forced" in forced.headline
    with pytest.raises(ProfileError, match="required and none matches exactly"):
        folders.find(profile=path, any_model=True, require=True)


def test_the_profile_of_this_model_comes_before_a_more_similar_device(
    folders: Folders, cuda_profile: Profile
) -> None:
    """A search that may take any model still prefers this one on a distant device."""
    folders.put("user", "other.yaml", of_another_model(cuda_profile, layers=47))
    mine = folders.put("shipped", "mine.yaml", variant(cuda_profile, "mine", compute_capability="8.0"))
    assert folders.find(any_model=True).path == mine
    Path(mine).unlink()
    assert folders.find(any_model=True).level is Level.OTHER_MODEL


def test_the_nearest_is_the_one_with_the_highest_score(folders: Folders, cuda_profile: Profile) -> None:
    folders.put("user", "a.yaml", variant(cuda_profile, "far", compute_capability="7.5", sm_count=40))
    near = folders.put("user", "b.yaml", variant(cuda_profile, "near", sm_count=130))
    folders.put("user", "c.yaml", variant(cuda_profile, "far", compute_capability="8.0", sm_count=108))
    result = folders.find()
    assert result.path == near
    assert "2 more at this level" in result.chain[-1]


def test_equal_matches_in_one_folder_take_the_newest_then_the_last_name(
    folders: Folders, cuda_profile: Profile
) -> None:
    data = cuda_profile.model_dump(by_alias=True)
    for name, date in (("a", "2026-11-20"), ("b", "2026-12-01"), ("c", "2026-01-01")):
        data["provenance"]["date"] = date
        folders.put("user", f"{name}.yaml", Profile.model_validate(data))
    assert Path(folders.find().path or "").name == "b.yaml"


# ---- Named profiles ----


def test_a_named_file_is_taken_whatever_lies_in_the_folders(
    folders: Folders, cuda_profile: Profile, tmp_path: Path
) -> None:
    folders.put("user", "exact.yaml", cuda_profile)
    save_profile(variant(cuda_profile, "mine", **SAME), tmp_path / "mine.yaml")
    result = folders.find(profile=tmp_path / "mine.yaml")
    assert (result.layer, result.level) == ("--profile", Level.SAME_DEVICE)
    assert result.profile is not None
    assert result.profile.label == "mine"


def test_a_profile_in_memory_can_be_named(folders: Folders, cuda_profile: Profile) -> None:
    result = folders.find(profile=cuda_profile)
    assert result.headline == "profile: h200.yaml (exact match)"


def test_a_named_file_that_cannot_be_read_is_an_error(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.yaml: cannot be read"):
        folders.find(profile=tmp_path / "none.yaml")


def test_a_named_file_for_another_kind_is_refused_loudly(folders: Folders, cpu_profile: Profile) -> None:
    path = folders.put("user", "cpu.yaml", cpu_profile)
    result = folders.find(profile=path)
    assert result.profile is None
    assert result.warnings == [f"[profile] {path} is not used: it is for cpu devices, here cuda"]


def test_switched_off(folders: Folders, cuda_profile: Profile) -> None:
    folders.put("user", "p.yaml", cuda_profile)
    result = folders.find(profile=None)
    assert (result.profile, result.level) == (None, Level.DEFAULT)
    assert result.chain == ["profile: switched off by the caller", "engine default"]
    assert result.headline == "profile: none (switched off)"


# ---- Require ----


@pytest.mark.parametrize("device", [SAME, NEAR, None])
def test_require_turns_any_fallback_into_an_error(
    folders: Folders, cuda_profile: Profile, device: dict[str, Any] | None
) -> None:
    if device is not None:
        folders.put("user", "p.yaml", variant(cuda_profile, "other", **device))
    with pytest.raises(ProfileError, match="required and none matches exactly: exact match: none"):
        folders.find(require=True)


def test_require_is_content_with_an_exact_match(folders: Folders, cuda_profile: Profile) -> None:
    path = folders.put("site", "p.yaml", cuda_profile)
    assert folders.find(require=True).path == path
    with pytest.raises(ProfileError, match="switched off"):
        folders.find(require=True, profile=None)


# ---- Broken files and odd folders ----


def test_a_broken_file_is_one_warning(folders: Folders, cuda_profile: Profile) -> None:
    broken = folders.write("user", "a.yaml", "schema: 1\nlabel: x\nsetings: {}\n")
    folders.write("user", "notes.txt", "not a profile")
    folders.write("user", ".p.yaml.x.tmp", "a write that was interrupted")
    good = folders.put("shipped", "p.yaml", cuda_profile)
    result = folders.find()
    assert result.path == good
    assert len(result.warnings) == 1
    assert result.warnings[0].startswith(f"[profile] {broken}:")
    Path(good).unlink()
    with pytest.raises(ProfileError, match=r"a\.yaml"):
        folders.find(require=True)


def test_warnings_go_to_the_log_unless_someone_takes_them(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.write("user", "a.yaml", "[]")
    with caplog.at_level(logging.WARNING, "dyno.profiles"):
        find_profile(DEVICE, MODEL, ENGINE, layers=folders.layers)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not a map of keys" in caplog.text


def test_listing_shows_broken_files_too(folders: Folders, cuda_profile: Profile) -> None:
    folders.put("shipped", "p.yaml", cuda_profile)
    folders.write("user", "a.yaml", "[]")
    listed = list_profiles(folders.layers)
    assert [(item.layer, item.profile is None, item.problem is None) for item in listed] == [
        ("shipped", False, True),
        ("user", True, False),
    ]


# ---- Where the layers are ----


def test_default_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DYNO_SITE_PROFILES", str(tmp_path / "site"))
    assert [(layer.name, layer.folder) for layer in default_layers()] == [
        ("shipped", shipped_folder()),
        ("site", tmp_path / "site"),
        ("user", tmp_path / "config" / "dyno" / "profiles"),
    ]
    monkeypatch.delenv("DYNO_SITE_PROFILES")
    assert default_layers()[1].folder == Path("/etc/dyno/profiles")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # to be ignored
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".config" / "dyno" / "profiles"


@pytest.mark.parametrize("empty", ["", "relative/home", None])
def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: str | None) -> None:
    """`Path.home()` takes it for the root of the file system."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if empty is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", empty)
    known = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert home() == known
    assert user_folder() == known / ".config" / "dyno" / "profiles"

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ProfileError, match="no home folder is known; set HOME or XDG_CONFIG_HOME"):
        user_folder()


def test_tune_writes_where_the_runtime_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda_profile: Profile
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DYNO_SITE_PROFILES", str(tmp_path / "none"))
    hostile = MODEL.model_copy(update={"architecture": "../../etc/x y"})
    path = default_path(DEVICE, hostile, ENGINE)
    assert path.parent == user_folder()
    path = default_path(DEVICE, MODEL, ENGINE)
    save_profile(cuda_profile, path)
    result = find_profile(DEVICE, MODEL, ENGINE)
    assert (result.path, result.layer, result.level) == (str(path), "user", Level.EXACT)


def test_shipped_profiles_are_valid() -> None:
    shipped = list_profiles([Layer("shipped", shipped_folder())])
    assert [item.problem for item in shipped if item.problem] == []
    for item in shipped:
        assert load_profile(item.path).evidence is not None
