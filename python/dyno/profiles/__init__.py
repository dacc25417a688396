"""Profiles: settings that were measured and proven for one device and one model, stored as YAML files.

`Profile` is the format. `docs/user/profile-reference.md` and `profiles/profile.schema.json` are
generated from it.
"""

from __future__ import annotations

from dyno.errors import ProfileError
from dyno.profiles._fields import MAX_COMMAND, MAX_NAME, MAX_TEXT, clean_text
from dyno.profiles.apply import Effective, effective, effective_settings, kernel_entries, rejections
from dyno.profiles.check import Listed, check_file, has_errors, list_profiles
from dyno.profiles.describe import Change, describe, diff
from dyno.profiles.evidence import (
    Crossing,
    Energy,
    Environment,
    Evidence,
    Gain,
    Noise,
    Provenance,
    Quality,
    Routing,
    Samples,
    Slice,
    Workload,
)
from dyno.profiles.identity import (
    CpuDevice,
    CudaDevice,
    Device,
    EngineIdentity,
    ModelIdentity,
    device_from_info,
    device_info,
    engine_from_build,
    model_from_description,
    shapes_fingerprint,
    weights_kind,
)
from dyno.profiles.io import (
    Problem,
    dumps_profile,
    load_profile,
    load_readable,
    loads_profile,
    save_profile,
    to_dict,
)
from dyno.profiles.layers import (
    Layer,
    default_layers,
    default_path,
    find_profile,
    shipped_folder,
    user_folder,
)
from dyno.profiles.match import Comparison, Decision, Level, MatchResult, compare, decide
from dyno.profiles.schema import KernelEntry, Match, Profile, SettingEntry, kernel_path, setting_path

__all__ = [
    "MAX_COMMAND",
    "MAX_NAME",
    "MAX_TEXT",
    "Change",
    "Comparison",
    "CpuDevice",
    "Crossing",
    "CudaDevice",
    "Decision",
    "Device",
    "Effective",
    "Energy",
    "EngineIdentity",
    "Environment",
    "Evidence",
    "Gain",
    "KernelEntry",
    "Layer",
    "Level",
    "Listed",
    "Match",
    "MatchResult",
    "ModelIdentity",
    "Noise",
    "Problem",
    "Profile",
    "ProfileError",
    "Provenance",
    "Quality",
    "Routing",
    "Samples",
    "SettingEntry",
    "Slice",
    "Workload",
    "check_file",
    "clean_text",
    "compare",
    "decide",
    "default_layers",
    "default_path",
    "describe",
    "device_from_info",
    "device_info",
    "diff",
    "dumps_profile",
    "effective",
    "effective_settings",
    "engine_from_build",
    "find_profile",
    "has_errors",
    "kernel_entries",
    "kernel_path",
    "list_profiles",
    "load_profile",
    "load_readable",
    "loads_profile",
    "model_from_description",
    "rejections",
    "save_profile",
    "setting_path",
    "shapes_fingerprint",
    "shipped_folder",
    "to_dict",
    "user_folder",
    "weights_kind",
]
