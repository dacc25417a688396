"""The device and the model that a foreign engine runs on, as a profile names them."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING, Any

from dyno import _core, _nvml, profiles
from dyno.errors import DynoError

from ...core.errors import TargetUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping

# CUdevice_attribute of cuda.h
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76


def cpu_device() -> dict[str, Any]:
    device = profiles.device_from_info(dict(_core.cpu_info()))
    return device.model_dump(mode="json", exclude_none=True)


def cuda_device(number: int) -> tuple[dict[str, Any], str]:
    """Properties and name of a GPU, from the driver and without a CUDA context. `number` is that of
    nvidia-smi.

    Raises:
        TargetUnusable: no driver, or no such GPU.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TargetUnusable(f"--gpu {number}: the CUDA driver cannot be loaded: {error}") from error

    def call(name: str, *arguments: Any) -> None:
        status = getattr(driver, name)(*arguments)
        if status != 0:
            raise TargetUnusable(
                f"--gpu {number}: {name} failed with error {status}; check that nvidia-smi lists this GPU"
            )

    call("cuInit", 0)
    handle, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    call("cuDeviceGet", ctypes.byref(handle), number)
    call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    call("cuDeviceGetName", name, 256, handle)
    values = []
    for attribute in (_MAJOR, _MINOR, _SM_COUNT):
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        values.append(value.value)
    device = {
        "kind": "cuda", "compute_capability": f"{values[0]}.{values[1]}", "sm_count": values[2],
        "memory_mib": max(1, memory.value >> 20),
    }  # fmt: skip
    return device, name.value.decode(errors="replace")


def gpu_facts(number: int) -> dict[str, Any]:
    """The PCI address and driver of a GPU, so that NVML can watch it; empty if unknown. `number` is that of
    nvidia-smi."""
    bus = _nvml.bus_id(number)
    told = {"pci_bus_id": bus, "driver": _nvml.facts(bus).get("driver") if bus else None}
    return {name: value for name, value in told.items() if value is not None}


def model_identity(path: str) -> dict[str, Any]:
    """The identity of a model: its architecture, shapes and types. If dyno has no graph for the architecture,
    they come from the file's metadata. Raises TargetUnusable."""
    try:
        gguf = _core.Gguf(path)
        weights = profiles.weights_kind({"general.name": gguf.get("general.name")})
        metadata = dict(gguf.metadata())
    except (DynoError, OSError) as error:
        raise TargetUnusable(str(error)) from error
    try:
        model = profiles.model_from_description(dict(_core.describe_model(path)), weights=weights)
    except DynoError:
        model = _from_metadata(path, metadata, gguf.tensors(), weights)
    return {
        **model.model_dump(mode="json", exclude_none=True),
        "file_bytes": os.path.getsize(path),
        "latent_cache": f"{model.architecture}.attention.kv_lora_rank" in metadata,
        "name": str(metadata.get("general.name") or os.path.basename(path)),
        "vocabulary": "tokenizer.ggml.model" in metadata and "tokenizer.ggml.tokens" in metadata,
    }


def _from_metadata(
    path: str, metadata: Mapping[str, Any], tensors: list[dict[str, Any]], weights: Any
) -> profiles.ModelIdentity:
    architecture = str(metadata.get("general.architecture") or "")
    counts: dict[str, int] = {}
    for tensor in tensors:
        elements = 1
        for extent in tensor["shape"]:
            elements *= int(extent)
        kind = re.sub(r"[^A-Z0-9_]", "_", str(tensor["dtype"]).upper())
        counts[kind] = counts.get(kind, 0) + elements
    total = sum(counts.values())

    def number(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}")
        return int(value) if isinstance(value, int) else 0

    if not architecture or not total or number("block_count") < 1 or number("embedding_length") < 1:
        raise TargetUnusable(f"{path}: no architecture, layers, width or tensors; the file is not a model")
    return profiles.ModelIdentity(
        architecture=architecture,
        layers=number("block_count"),
        embedding=number("embedding_length"),
        experts=number("expert_count"),
        experts_used=number("expert_used_count"),
        types={k: round(c / total, 4) for k, c in sorted(counts.items(), key=lambda i: (-i[1], i[0])) if c},
        weights=weights,
    )
