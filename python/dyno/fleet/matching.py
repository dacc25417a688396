"""The profile that each node of a fleet would use for each model, and the tunes to run next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno.profiles.layers import find_profile, scan
from dyno.profiles.match import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dyno.fleet.nodes import Node
    from dyno.profiles.identity import EngineIdentity, ModelIdentity
    from dyno.profiles.layers import Layer
    from dyno.profiles.match import MatchResult

EXACT_CODE, NEAR_CODE, NONE_CODE = 0, 3, 4


@dataclass(frozen=True)
class Want:
    """A model that the nodes should run."""

    title: str
    model: ModelIdentity


@dataclass(frozen=True)
class Row:
    """The match of one kind of device of a node with one model."""

    node: Node
    want: Want
    result: MatchResult | None
    """None if the description does not identify the device."""

    @property
    def level(self) -> Level:
        return Level.DEFAULT if self.result is None else self.result.level

    @property
    def code(self) -> int:
        """Exit code: 0 exact, 3 near, 4 no profile."""
        if self.level is Level.EXACT:
            return EXACT_CODE
        return NONE_CODE if self.level is Level.DEFAULT else NEAR_CODE

    @property
    def why(self) -> str:
        """The differences, the assumptions, or the reason why nothing fits, in one line."""
        if self.result is None:
            return self.node.problem
        reasons = list(self.result.reasons) if self.result.profile is not None else self.result.chain[:-1]
        return "; ".join([*reasons, *(f"assumed: {a}" for a in self.node.assumed)])

    def to_dict(self) -> dict[str, Any]:
        device = self.node.device
        return {
            "node": self.node.name,
            "product": self.node.title,
            "count": self.node.count,
            "driver": self.node.driver,
            "device": None if device is None else device.model_dump(exclude_none=True),
            "assumed": list(self.node.assumed),
            "model": self.want.title,
            "match": ("exact", "near", "none")[(EXACT_CODE, NEAR_CODE, NONE_CODE).index(self.code)],
            "level": self.level.name.lower(),
            "profile": None if self.result is None else self.result.path,
            "layer": None if self.result is None else self.result.layer,
            "why": self.why,
            "chain": [] if self.result is None else self.result.chain,
        }


@dataclass(frozen=True)
class ToTune:
    """A kind of device and a model without an exact profile."""

    title: str
    want: Want
    devices: int
    nodes: int
    near: bool
    """Whether the profile of a similar device is used meanwhile."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "product": self.title,
            "model": self.want.title,
            "devices": self.devices,
            "nodes": self.nodes,
            "near": self.near,
        }


@dataclass
class Fleet:
    """The rows of all nodes and models."""

    rows: list[Row]
    warnings: list[str] = field(default_factory=list)

    @property
    def worst(self) -> int:
        return max((row.code for row in self.rows), default=NONE_CODE)

    @property
    def best(self) -> int:
        return min((row.code for row in self.rows), default=NONE_CODE)

    def to_tune(self) -> list[ToTune]:
        """Kinds of devices without an exact profile. Those without any profile come first, then the most
        frequent ones."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.code != EXACT_CODE and row.node.count:
                device = row.node.device
                kind = row.node.title if device is None else device.model_dump_json()
                groups.setdefault((kind, row.want.title), []).append(row)
        found = [
            ToTune(
                rows[0].node.title,
                rows[0].want,
                sum(row.node.count for row in rows),
                len({row.node.name for row in rows}),
                rows[0].code == NEAR_CODE,
            )
            for rows in groups.values()
        ]
        return sorted(found, key=lambda t: (t.near, -t.devices, t.title, t.want.title))


def known_models(layers: Sequence[Layer], engine: EngineIdentity, tell: Callable[[str], None]) -> list[Want]:
    """All models that profiles of this engine were measured with, without duplicates."""
    found: dict[str, Want] = {}
    for item in scan(layers, tell):
        if item.profile.match.engine.name != engine.name:
            continue
        model = item.profile.match.model
        provenance = item.profile.provenance
        title = (provenance.model_file if provenance else None) or item.profile.label or model.architecture
        found.setdefault(model.model_dump_json(), Want(title, model))
    return sorted(found.values(), key=lambda want: want.title)


def match(
    nodes: Sequence[Node], wants: Sequence[Want], engine: EngineIdentity, layers: Sequence[Layer]
) -> Fleet:
    """The profile that each node would use for each model, from the same search as in the runtime.

    Args:
        nodes: the kinds of devices of all nodes.
        wants: the models.
        engine: the engine that would run; a profile of another engine or ops revision does not fit exactly.
        layers: folders of profiles in ascending precedence.
    """
    known: dict[tuple[str, str], MatchResult] = {}
    warnings: dict[str, None] = {}
    rows = []
    for node in nodes:
        for want in wants:
            if node.device is None:
                rows.append(Row(node, want, None))
                continue
            key = node.device.model_dump_json(), want.model.model_dump_json()
            if key not in known:
                known[key] = find_profile(
                    node.device,
                    want.model,
                    engine,
                    layers=layers,
                    warn=lambda line: warnings.update({line: None}),
                )
            rows.append(Row(node, want, known[key]))
    return Fleet(rows, list(warnings))
