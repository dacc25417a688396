"""The comparison of machines: results of one must hold for another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno import profiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .protocol import Description


def device_of(
    description: Description, rates: Mapping[str, float]
) -> profiles.CpuDevice | profiles.CudaDevice:
    """The device of a description, in the form of a profile.

    Args: `rates`: measured rates, `memory_gbps` and `pcie_gbps`."""
    kind = profiles.CudaDevice if description.device.get("kind") == "cuda" else profiles.CpuDevice
    fields = {k: v for k, v in rates.items() if k in kind.model_fields}
    return kind(**{**description.device, **fields})


def model_of(description: Description) -> profiles.ModelIdentity:
    fields = profiles.ModelIdentity.model_fields
    return profiles.ModelIdentity(**{k: v for k, v in description.model.items() if k in fields})


def engine_of(description: Description) -> profiles.EngineIdentity:
    fields = profiles.EngineIdentity.model_fields
    return profiles.EngineIdentity(**{k: v for k, v in description.engine.items() if k in fields})


def match_of(description: Description) -> profiles.Match:
    """The properties by which a profile made here would match."""
    return profiles.Match(
        device=device_of(description, {}), model=model_of(description), engine=engine_of(description)
    )


def differences(first: profiles.Match, other: Description) -> list[str]:
    """The differences that prevent an exact match of a profile for `first` with `other`."""
    found = profiles.compare(first, device_of(other, {}), model_of(other), engine_of(other))
    return [] if found.level is profiles.Level.EXACT else list(found.reasons)


def versions_of(description: Description) -> dict[str, Any]:
    """The versions that affect rates, but are not part of the match of a profile."""
    gpu: Mapping[str, Any] = description.engine.get("gpu") or {}
    found = {
        "commit": description.engine.get("commit"), "compiler": description.engine.get("compiler"),
        "driver": gpu.get("driver"), "cuda": gpu.get("cuda"),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}
