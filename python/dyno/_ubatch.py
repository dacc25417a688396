"""The default u-batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "CHOICES",
    "GPU_PROPERTIES",
    "RESERVE_BYTES",
    "SHARE",
    "STREAMED_SHARE",
    "Needs",
    "UsualUbatch",
    "free_bytes",
    "largest",
]

CHOICES: Final[tuple[int, ...]] = (512, 1024, 2048, 4096)
"""U-batches in tokens. The first is the default of the CPU, where larger ones cost memory and are no faster.

With the 20M mixture of experts in Q4_K_M, 1024 and 2048 took 0.97 to 1.00 times as long as 512, for 2048
tokens on a CPU."""
SHARE: Final = 0.03
"""Share of the free GPU memory that a larger u-batch than the first may cost."""
STREAMED_SHARE: Final = 0.1
"""The same share if weights lie on the CPU.

Copies of those weights cross the link for each u-batch, so doubling the u-batch nearly halves the time. With
8 GiB for qwen3moe-30b in Q4_0 on an H100, 4096 instead of 2048 reads a prompt of 4096 tokens 1.87 times as
fast, and as many layers keep their experts there (`benchmarks/results/h100_vram_limits.json`)."""
RESERVE_BYTES: Final = 512 << 20
"""Memory of a GPU in bytes that the engine reserves for the runtime in addition to the plan."""
_FULL: Final = 0.92
"""Share of the GPU memory that a plan and its reserve may take. The rest is for other programs."""

GPU_PROPERTIES: Final = frozenset(
    {"kind", "memory_bytes", "l2_bytes", "compute_capability", "sm_count", "shared_per_block_bytes"}
    | {"maps_memory"}
)
"""Properties of a GPU that a plan depends on. A plan made with them does not need the GPU itself."""

_PARTS: Final = ("weights_bytes", "kv_bytes", "state_bytes", "arena_bytes", "stream_bytes")


class Needs(NamedTuple):
    """The bytes that a u-batch needs on the main device."""

    arena: int
    weights: int
    total: int
    """Total bytes, including the reserve."""


def largest(
    needs: Callable[[int], Needs], memory_bytes: int, free_bytes: int | None = None, streams: bool = False
) -> int:
    """The largest u-batch that costs little.

    Args:
        needs: Function that gives the bytes for a u-batch.
        memory_bytes: Total memory of the device.
        free_bytes: Memory that other programs leave free; None: unknown.
        streams: Whether copies of weights in host memory cross to the device. They do if the model does not
            fit.

    Returns:
        The largest of `CHOICES` whose arena exceeds the arena of the first one by at most `SHARE` (or
        `STREAMED_SHARE`) of the free memory. If the model fits with the first one, it still fits. If it does
        not fit, at least half of the weights that fit with the first one still fit.
    """
    first = needs(CHOICES[0])
    free = memory_bytes if free_bytes is None else min(memory_bytes, free_bytes)
    full = min(int(_FULL * memory_bytes), free)
    fits = first.total <= full
    share = STREAMED_SHARE if streams or not fits else SHARE
    for ubatch in reversed(CHOICES[1:]):
        each = needs(ubatch)
        room, first_room = (full - one.total + one.weights for one in (each, first))
        holds = each.total <= full if fits else first_room > 0 and 2 * room >= first_room
        if each.arena - first.arena <= share * free and holds:
            return ubatch
    return CHOICES[0]


def free_bytes(name: str) -> int | None:
    """Free memory of a GPU by its name, in bytes; None if the GPU is only described. The call starts CUDA on
    the GPU.

    Raises:
        DeviceError: The GPU does not answer.
    """
    from dyno import _core

    number = name.partition(":")[2]
    if not number or _core.no_cuda_reason():
        return None
    return int(_core.gpu_free_bytes(int(number)))


class UsualUbatch:
    """The default u-batch of a model on a device, by its load and context settings.

    Args:
        file: An open `_core.Gguf`, or a path.
        device: Properties of the main device, as the engine reports them.
        name: Name of the main device. Placement rules can name others.
        free: Function that gives the bytes that other programs leave free, or None if unknown. It is called
            once, at the first use, so the engine should not have allocated its memory by then.

    Weights that an automatic placement would move count as lying on the device.
    """

    def __init__(
        self,
        file: Any,
        device: Mapping[str, Any],
        name: str = "cuda:0",
        free: Callable[[], int | None] | None = None,
    ) -> None:
        self._file = file
        # Without further facts from the driver.
        self._device = {name: value for name, value in device.items() if name in GPU_PROPERTIES}
        self._name = name
        self._known: dict[str, int] = {}
        self._free = functools.cache(free or (lambda: None))

    def __call__(self, values: Mapping[str, Any]) -> int:
        """The u-batch for these settings. Only load and context settings matter.

        Raises:
            DynoError: No plan of the model exists with these settings.
        """
        if self._device["kind"] != "cuda":
            return CHOICES[0]
        kinds = {k: {n: v for n, v in values.items() if SETTINGS[n].kind == k} for k in ("load", "context")}
        key = repr(kinds)
        if key not in self._known:
            self._known[key] = self._plan(kinds["load"], kinds["context"])
        return self._known[key]

    def _plan(self, load: dict[str, Any], context: dict[str, Any]) -> int:
        from dyno import _core

        named = bool(load.get("placement"))
        session = _core.Session(
            self._file,
            load={**load, "device": self._name} if named else load,
            context=context,
            session={"ubatch": CHOICES[0], "cuda_graphs": False},
            plan_only=True,
            device=None if named else dict(self._device),
        )
        try:

            def needs(ubatch: int) -> Needs:
                session.set({"ubatch": ubatch})
                plan = session.plan
                main = plan["devices"][0]
                total = int(plan["scratch_bytes"]) + RESERVE_BYTES
                total += sum(int(main[part]) for part in _PARTS)
                return Needs(int(main["arena_bytes"]), int(main["weights_bytes"]), total)

            streams = int(session.plan["devices"][0]["stream_bytes"]) > 0
            return largest(needs, int(self._device["memory_bytes"]), self._free(), streams)
        finally:
            session.close()
