"""The declaration of this project's engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dyno.scheduler import DEFAULT_SEQUENCES

from ...space.knobs import Facts, Knob, moved_by, resolve
from ..declaration import Declaration, TargetRequest
from . import kept_answers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...core.protocol import Description, Workload

USUAL_CTX = 4096  # context length in tokens, unless the workload needs more


class DynoDeclaration(Declaration):
    """The declaration of this project's engine, which has kernels and a memory plan."""

    kernels = True
    memory_plan = True

    def knobs(
        self, description: Description, workload: Workload, *, approx: bool, held: Mapping[str, Any]
    ) -> tuple[Knob, ...]:
        facts = Facts(
            device=description.device,
            model=description.model,
            workload=workload,
            defaults=description.engine["defaults"],
            ctx=int(description.engine["ctx"]),
            host_weights=bool(description.engine.get("host_weights")),
            streams=bool(description.engine.get("streams")),
            host_cores=int(description.engine.get("host_cores") or 0),
            host_nodes=int(description.engine.get("host_nodes") or 1),
        )
        found = resolve(facts, approx=approx, held=held)
        # All settings affect the output rate of a server, because its prompts are part of the time.
        return found if workload.served is None else moved_by(found, "tg")

    def worker_options(self, request: TargetRequest) -> dict[str, Any]:
        kept = kept_answers.folder()
        least = request.longest if request.served else max(USUAL_CTX, request.longest)
        ctx = request.ctx if request.ctx is not None else least
        own = {
            "text": request.text,
            "ctx": ctx,
            "device": request.device,
            "cache": str(kept) if kept else None,
            "sequences": DEFAULT_SEQUENCES if request.served else 1,
            **request.placement,
        }
        return {**super().worker_options(request), **own}

    def least_deadline(self, device: str, model: str) -> float:
        """The least deadline of a trial in seconds. On a GPU, it includes loading the weights, in the worst
        case from disk."""
        return 6.0 if device == "cpu" else 20.0 + os.path.getsize(model) / 0.5e9


def declaration(engine: str) -> Declaration:
    return DynoDeclaration(engine)
