"""The declaration of a target: the facts about an engine that the tuner needs before a worker runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.protocol import Description, Settings, Workload
    from ..space.knobs import Knob


@dataclass(frozen=True)
class TargetRequest:
    """The request for a target, which is the same for all engines.

    Args:
        model: Path of a GGUF file.
        device: `cpu` or `cuda:N`.
        longest: Context length that the workload needs.
        ctx: Requested context length; None: as much as the workload needs.
        settings: Fixed values by name.
        scratch: Folder for files of this run.
        text: File with the text of the prompts.
        log: File for the output of another engine's processes.
        served: Whether the workload is the load of a server.
        placement: Devices and limits, only for dyno: `virtual_devices`, `vram` and `ram` (bytes).
        options: Options of this engine only, which its declaration has read from the command line.
    """

    model: str
    device: str = "cpu"
    longest: int = 0
    ctx: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    scratch: str | None = None
    text: str | None = None
    log: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    served: bool = False
    placement: Mapping[str, Any] = field(default_factory=dict)


class Declaration:
    """The declaration of an engine. A new target overrides the parts that differ.

    `foreign` engines are programs of other projects, given by `--bin`, which split a model over GPUs
    themselves.
    """

    foreign = False
    kernels = False  # whether a tune chooses kernels
    memory_plan = False  # whether there is a memory plan for --vram and --pareto
    verify_seconds = 120.0  # default budget of `tune verify`

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def knobs(
        self, description: Description, workload: Workload, *, approx: bool, held: Mapping[str, Any]
    ) -> tuple[Knob, ...]:
        """The knobs of a search.

        Args:
            approx: Whether to include knobs that change answers.
            held: Settings that the user has fixed, which are not searched.
        """
        raise TuneError(f"{self.engine} declares no knobs; give a space to search")

    def legal(self, description: Description) -> Callable[[Settings], bool] | None:
        """A constraint on points of the space; None: all points are legal."""
        return None

    def worker_options(self, request: TargetRequest) -> dict[str, Any]:
        """The options of `from_options` in the worker."""
        return {"model": request.model, "settings": dict(request.settings), "scratch": request.scratch}

    def least_deadline(self, device: str, model: str) -> float:
        """The least deadline of a trial in seconds."""
        return 6.0

    def left_out(self, description: Description, *, approx: bool) -> Sequence[str]:
        """Lines for people about knobs that are not searched, and the reasons."""
        return ()
