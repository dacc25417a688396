"""The declaration of llama.cpp and ik_llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..declaration import Declaration, TargetRequest
from . import knobs as ggml_knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...core.protocol import Description, Settings, Workload
    from ...space.knobs import Knob


class GgmlDeclaration(Declaration):
    """The declaration of a foreign engine, where each measurement is a process of its binaries."""

    foreign = True
    verify_seconds = 600.0

    def knobs(
        self, description: Description, workload: Workload, *, approx: bool, held: Mapping[str, Any]
    ) -> tuple[Knob, ...]:
        return ggml_knobs.make_knobs(
            description.engine, description.model, workload, approx=approx, held=tuple(held)
        )

    def legal(self, description: Description) -> Callable[[Settings], bool]:
        return ggml_knobs.legal(description.engine, description.device)

    def worker_options(self, request: TargetRequest) -> dict[str, Any]:
        log = {"log": request.log} if request.log is not None else {}
        served = {"served": True} if request.served else {}
        return {**super().worker_options(request), **request.options, **log, **served}

    def least_deadline(self, device: str, model: str) -> float:
        return 120.0

    def left_out(self, description: Description, *, approx: bool) -> Sequence[str]:
        lines = []
        if not description.capabilities.answers:
            lines.append(
                "answers cannot be compared (no llama-perplexity, or no vocabulary in the model), so only "
                "settings that change no bit are searched"
            )
        refused = dict(description.engine.get("refused", {}))
        if not approx:
            refused["kv_type_k, kv_type_v"] = "they change answers; give --allow-approx KLD"
        lines += [f"{name} is not searched: {why}" for name, why in refused.items()]
        return [*lines, *map(str, description.engine.get("notes", []))]


def declaration(engine: str) -> Declaration:
    return GgmlDeclaration(engine)
