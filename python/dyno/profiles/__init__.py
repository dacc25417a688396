"""Profiles: settings that were measured and proven for one device and one model, as YAML files.

`Profile` is the format; `docs/profile-reference.md` and `profiles/profile.schema.json` are generated from it.
"""

from __future__ import annotations

from dyno.errors import ProfileError
from dyno.profiles.evidence import Evidence, Gain, Noise, Provenance, Quality, Routing, Samples, Workload
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
from dyno.profiles.io import Problem, dumps_profile, load_profile, loads_profile, save_profile
from dyno.profiles.schema import KernelEntry, Match, Profile, SettingEntry, kernel_path, setting_path

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "EngineIdentity",
    "Evidence",
    "Gain",
    "KernelEntry",
    "Match",
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
    "Workload",
    "device_from_info",
    "device_info",
    "dumps_profile",
    "engine_from_build",
    "kernel_path",
    "load_profile",
    "loads_profile",
    "model_from_description",
    "save_profile",
    "setting_path",
    "shapes_fingerprint",
    "weights_kind",
]
