"""Device, model and engine of the measurements of a profile, as comparable properties."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from dyno.profiles._fields import (
    Count,
    Fraction,
    Name,
    Positive,
    PositiveCount,
    StrictModel,
    plain_value,
)
from dyno.settings import ENGINES

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_SHARE = 0.0001
"""Least share of a weight type that occurs at all in a model. A match tolerates this difference."""
CPU_ISAS = ("portable", "avx2", "avx512_vnni")
"""Instruction sets that CPU kernels are compiled for, in ascending order."""


def _as_capability(value: Any) -> Any:
    """Accept an unquoted 9.0, which YAML reads as a number."""
    return f"{value:.1f}" if isinstance(value, float) and value == round(value, 1) else value


class CudaDevice(StrictModel):
    """A CUDA device by its properties, without its marketing name."""

    kind: Literal["cuda"] = "cuda"
    compute_capability: Annotated[
        str,
        BeforeValidator(_as_capability),
        Field(pattern=r"^[0-9]{1,2}\.[0-9]$", description='Compute capability as text, such as "9.0".'),
    ]
    sm_count: int = Field(ge=1, le=4096, description="Streaming multiprocessors.")
    memory_mib: PositiveCount = Field(description="Total memory of the device in MiB.")
    memory_gbps: Positive | None = Field(
        default=None, description="Measured memory bandwidth in GB/s; only ranks profiles."
    )
    pcie_gbps: Positive | None = Field(
        default=None, description="Measured host-to-device bandwidth in GB/s; only ranks profiles."
    )
    host_memory_gbps: Positive | None = Field(
        default=None,
        description="Measured bandwidth of the machine's own memory in GB/s; does not count for matches.",
    )
    power_limit_w: Positive | None = Field(default=None, description="Enforced power limit in watts.")


class CpuDevice(StrictModel):
    """The CPU of a machine by its properties, as far as the process may use it."""

    kind: Literal["cpu"] = "cpu"
    isa: Literal["portable", "avx2", "avx512_vnni"] = Field(
        description="Best instruction set that the kernels could use."
    )
    cores: int = Field(ge=1, le=65536, description="Cores that the process may run on.")
    l1d_kib: Count | None = Field(default=None, description="L1 data cache of a core in KiB.")
    l2_kib: Count | None = Field(default=None, description="L2 cache of a core in KiB.")
    l3_kib: Count | None = Field(default=None, description="Shared L3 cache in KiB; 0: none.")
    memory_mib: PositiveCount = Field(description="Total memory of the machine in MiB.")
    memory_gbps: Positive | None = Field(
        default=None, description="Measured memory bandwidth in GB/s; only ranks profiles."
    )
    virtual: Name | None = Field(
        default=None,
        description="Limits of a virtual device, e.g. link_gbps=8 memory_mib=4096; none for the CPU itself.",
    )


def _device_tag(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"<{kind}>" if kind in ("cuda", "cpu") else None


Device = Annotated[
    Annotated[CudaDevice, Tag("<cuda>")] | Annotated[CpuDevice, Tag("<cpu>")],
    Discriminator(
        _device_tag,
        custom_error_type="profile",
        custom_error_message="must be a map with kind: cuda or kind: cpu",
    ),
]
"""A `CudaDevice` or a `CpuDevice`, distinguished by `kind`."""


class ModelIdentity(StrictModel):
    """A model by architecture, shapes and types. Its name and the values of its weights do not count."""

    architecture: Name = Field(description="general.architecture of the GGUF file.")
    layers: int = Field(ge=1, le=65536, description="Transformer layers.")
    embedding: PositiveCount = Field(description="Width of the residual stream.")
    feed_forward: Count | None = Field(default=None, description="Width of the dense feed-forward layers.")
    expert_feed_forward: Count | None = Field(default=None, description="Width of one expert.")
    heads: Count | None = Field(default=None, description="Attention heads of the first layer.")
    kv_heads: Count | None = Field(default=None, description="Key/value heads of the first layer.")
    vocab: Count | None = Field(default=None, description="Tokens in the vocabulary.")
    experts: Count = Field(default=0, description="Experts of a layer; 0 for a dense model.")
    experts_used: Count = Field(default=0, description="Experts that a token uses.")
    types: dict[Annotated[str, Field(pattern=r"^[A-Z0-9_]{2,16}$")], Fraction] = Field(
        min_length=1, description="Share of the weights' elements by type, e.g. {Q4_0: 0.93, Q6_K: 0.07}."
    )
    shapes: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = Field(
        default=None, description="Fingerprint of every dimension of every layer (see `shapes_fingerprint`)."
    )
    weights: Literal["real", "synthetic"] = Field(
        default="real", description="`synthetic`: random weights; never an exact match for a real model."
    )

    @field_validator("types")
    @classmethod
    def _shares_add_up(cls, value: dict[str, float]) -> dict[str, float]:
        total = sum(value.values())
        if not 0.9 <= total <= 1.1:  # shares have only two digits
            raise ValueError(f"the shares of the types add up to {total:.3f} instead of 1")
        return value


BuildValue = bool | Annotated[int, Field(ge=-(2**53), le=2**53)] | Annotated[str, Field(max_length=500)]


class EngineIdentity(StrictModel):
    """The engine that was measured."""

    name: Literal["dyno", "llama.cpp", "ik_llama.cpp"] = "dyno"
    version: Name = Field(description="Version of dyno, or the build number or commit of another engine.")
    ops_revision: Count | None = Field(
        default=None,
        description="Revision of dyno's kernels; measurements of one revision do not hold for another.",
    )
    build: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,63}$")],
        Annotated[
            BuildValue | Annotated[list[BuildValue], Field(max_length=64)], BeforeValidator(plain_value)
        ],
    ] = Field(default_factory=dict, description="Build switches, e.g. {GGML_CUDA_LTO: false}.")


def device_from_info(
    info: Mapping[str, Any], *, memory_gbps: float | None = None, pcie_gbps: float | None = None
) -> CpuDevice | CudaDevice:
    """The device of a profile, from a device description of the engine (`dyno._core.cpu_info()`).

    Args:
        info: properties as the engine reports them: `kind`, `isa`, `cores`, `l1d_bytes`, `memory_bytes`, ...
        memory_gbps: Measured memory bandwidth in GB/s, if known.
        pcie_gbps: Measured host-to-device bandwidth in GB/s (CUDA), if known.

    Raises:
        KeyError: A property is missing.
    """
    memory_mib = max(1, round(info["memory_bytes"] / 2**20))
    if info["kind"] == "cuda":
        capability = info["compute_capability"]
        if isinstance(capability, int):  # 90 = 9.0
            capability = f"{capability // 10}.{capability % 10}"
        return CudaDevice(
            compute_capability=capability,
            sm_count=info["sm_count"],
            memory_mib=memory_mib,
            memory_gbps=memory_gbps,
            pcie_gbps=pcie_gbps,
            power_limit_w=info.get("power_limit_w"),
        )
    return CpuDevice(
        isa=info["isa"],
        cores=info["cores"],
        l1d_kib=info["l1d_bytes"] // 1024,
        l2_kib=info["l2_bytes"] // 1024,
        l3_kib=info["l3_bytes"] // 1024,
        memory_mib=memory_mib,
        memory_gbps=memory_gbps,
        virtual=info.get("virtual"),
    )


# KiB of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"). A profile does not contain it, because it follows from the compute
# capability.
_SHARED_KIB = {
    **{75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227},
    **{100: 227, 103: 227, 110: 227, 120: 99, 121: 99},
}
_LEAST_SHARED_KIB = 48  # on all GPUs


def device_info(device: CpuDevice | CudaDevice) -> dict[str, Any]:
    """The device description of the engine for a profile's device, as an argument of `supports` and
    `candidates`."""
    if isinstance(device, CudaDevice):
        major, minor = device.compute_capability.split(".")
        capability = int(major) * 10 + int(minor)
        return {
            "kind": "cuda",
            "name": "",
            "memory_bytes": device.memory_mib << 20,
            "compute_capability": capability,
            "sm_count": device.sm_count,
            "shared_per_block_bytes": _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10,
        }
    info: dict[str, Any] = {
        "kind": "cpu",
        "name": "",
        "memory_bytes": device.memory_mib << 20,
        "isa": device.isa,
        "cores": device.cores,
    }
    for key in ("l1d", "l2", "l3"):
        size = getattr(device, f"{key}_kib")
        if size is not None:
            info[f"{key}_bytes"] = size * 1024
    return info


# Facts that other fields imply, and that descriptions of earlier versions lack, are ignored like sizes.
_NOT_SHAPES = frozenset(
    {
        "n_ctx_train",
        "chosen_positions",
        "types",
        "draft_types",
        "parameters",
        "unused_tensors",
        "gated",
        "v_norm",
        "recurrent_layers",
    }
)


def _shapes(value: Any) -> Any:
    """The whole numbers and flags of a description, without rates, names and types."""
    if isinstance(value, dict):
        kept = {str(key): _shapes(item) for key, item in value.items() if key not in _NOT_SHAPES}
        return {key: item for key, item in sorted(kept.items()) if item is not None}
    if isinstance(value, list | tuple):
        return [item for item in map(_shapes, value) if item is not None]
    return value if isinstance(value, int) else None


def shapes_fingerprint(description: Mapping[str, Any]) -> str:
    """A hash of all dimensions of a model, as sixteen hexadecimal digits.

    It covers the whole numbers and flags of `dyno._core.describe_model()`, at any depth. It ignores floats
    (epsilons, rope bases), names, types, the trained context length and sizes in bytes. Files that differ
    only in those run the same kernels on the same shapes.
    """
    canonical = json.dumps(
        [str(description["architecture"]), _shapes(dict(description))], separators=(",", ":"), sort_keys=True
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _width(description: Mapping[str, Any], kind: str) -> int | None:
    """Width of the first feed-forward layer of a kind (`dense` or `moe`)."""
    for layer in description["layers"]:
        if layer["ffn"]["kind"] == kind:
            return int(layer["ffn"]["width"])
    return None


def model_from_description(
    description: Mapping[str, Any], *, weights: Literal["real", "synthetic"] = "real"
) -> ModelIdentity:
    """The model of a profile, from a model description of the engine (`dyno._core.describe_model()`).

    Raises:
        KeyError, IndexError: The description lacks a field, or has no layers.
    """
    # Types with few elements are listed as well, because GGML_CUDA_PROFILE builds kernels for the types of a
    # profile.
    shares = {str(name).upper(): float(share) for name, share in description["types"].items() if share}
    types = {name: max(round(share, 4), LEAST_SHARE) for name, share in shares.items()}
    for name in description.get(
        "draft_types", ()
    ):  # the MTP head uses kernels of these types, but has few weights
        types.setdefault(str(name).upper(), LEAST_SHARE)
    # Layers with recurrent state have no heads.
    layers = [layer["attention"] for layer in description["layers"]]
    attention = max(layers, key=lambda a: bool(a["heads"]))
    return ModelIdentity(
        architecture=description["architecture"],
        layers=description["n_layers"],
        embedding=description["n_embd"],
        feed_forward=_width(description, "dense"),
        expert_feed_forward=_width(description, "moe"),
        heads=attention["heads"],
        kv_heads=attention["kv_heads"],
        vocab=description["n_vocab"],
        experts=description["experts"],
        experts_used=description["experts_used"],
        types=dict(sorted(types.items(), key=_by_share)),
        shapes=shapes_fingerprint(description),
        weights=weights,
    )


def _by_share(item: tuple[str, float]) -> tuple[float, str]:
    return -item[1], item[0]


def weights_kind(metadata: Mapping[str, Any]) -> Literal["real", "synthetic"]:
    """`synthetic` if the file declares random weights (`general.name` has the word "synthetic"), else
    `real`."""
    name = metadata.get("general.name")
    return (
        "synthetic" if isinstance(name, str) and re.search(r"\bsynthetic\b", name, re.IGNORECASE) else "real"
    )


def engine_from_build(info: Mapping[str, Any]) -> EngineIdentity:
    """The engine of a profile, from `dyno._core.build_info()`."""
    build: dict[str, BuildValue | list[BuildValue]] = {
        str(name): _switch(value) for name, value in info["switches"].items()
    }
    return EngineIdentity(version=info["version"], ops_revision=info["ops_revision"], build=build)


def _switch(value: bool | int | str) -> bool | int | str:
    """The value of a CMake switch as it is written in a profile: ON is true."""
    if isinstance(value, str):
        return {"ON": True, "TRUE": True, "OFF": False, "FALSE": False, "": False}.get(value.upper(), value)
    return value


__all__ = [
    "CPU_ISAS",
    "ENGINES",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "EngineIdentity",
    "ModelIdentity",
    "device_from_info",
    "device_info",
    "engine_from_build",
    "model_from_description",
    "shapes_fingerprint",
    "weights_kind",
]
