"""The declaration of a target: what the tuner has to know of an engine before a worker runs it."""

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
    """The request for a target, the same for every engine.

    Args:
        model: path of a GGUF file.
        device: `cpu` or `cuda:N`.
        longest: tokens of context that the workload takes.
        ctx: context that the user has asked for; None: as much as the workload takes.
        settings: values held fixed, by name.
        scratch: folder for files of this run.
        text: file whose text the prompts are.
        log: file that keeps what processes of another engine say.
        served: whether the workload is the load of a server.
        placement: devices and limits of dyno alone: `virtual_devices`, `vram` and `ram` (bytes).
        options: of this engine alone, as its declaration has read them from the command line.
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
    """The declaration of one engine. A new target overrides what differs.

    `foreign` engines are programs of others, named by `--bin`; they spread a model over GPUs by themselves.
    """

    foreign = False
    kernels = False  # whether a tune chooses kernels
    memory_plan = False  # whether --vram and --pareto have a plan to go by
    verify_seconds = 120.0  # usual budget of `tune verify`

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def knobs(
        self, description: Description, workload: Workload, *, approx: bool, held: Mapping[str, Any]
    ) -> tuple[Knob, ...]:
        """The knobs of a search.

        Args:
            approx: also those that change answers.
            held: settings that the user has fixed; they are not searched.
        """
        raise TuneError(f"{self.engine} declares no knobs; give a space to search")

    def legal(self, description: Description) -> Callable[[Settings], bool] | None:
        """A constraint that points of the space must keep; None: every point is legal."""
        return None

    def worker_options(self, request: TargetRequest) -> dict[str, Any]:
        """The options of `from_options` in the worker."""
        return {"model": request.model, "settings": dict(request.settings), "scratch": request.scratch}

    def least_deadline(self, device: str, model: str) -> float:
        """Seconds that any trial may take."""
        return 6.0

    def left_out(self, description: Description, *, approx: bool) -> Sequence[str]:
        """Lines for people: what is not searched, and why."""
        return ()
