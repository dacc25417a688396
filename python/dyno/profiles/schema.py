"""The typed models of the YAML file, from which JSON schema and reference page are generated."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from dyno.profiles import _yaml
from dyno.profiles._fields import (
    GroupName,
    Interval,
    Name,
    PositiveCount,
    Ratio,
    StrictModel,
    Text,
    interval_problem,
    parse_tokens,
    problem,
    setting_value,
)
from dyno.profiles.evidence import Evidence, Provenance
from dyno.profiles.identity import CpuDevice, CudaDevice, Device, EngineIdentity, ModelIdentity
from dyno.settings import SETTINGS, applies_on, suggestion, unknown_setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMA_VERSION = 1

Value = Annotated[
    bool
    | Annotated[int, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(ge=-1e15, le=1e15)]
    | Annotated[str, Field(max_length=512)]
    | Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=256)],
    BeforeValidator(setting_value),
]
Moved = Literal["pp", "tg", "memory", "vram"]
_MOVED_SCHEMA = {"enum": list(get_args(Moved))}
_MOVES_SCHEMA = {"anyOf": [_MOVED_SCHEMA, {"type": "array", "items": _MOVED_SCHEMA}]}


def _as_moves(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SettingEntry(StrictModel):
    """A setting whose value beat the default, with its proof."""

    value: Value = Field(description="The value, in the type and range of the setting.")
    default: Value | None = Field(default=None, description="The engine's default when this was measured.")
    ratio: Ratio | None = Field(
        default=None,
        description="Speed of the whole profile / with this entry at its default; above 1 is faster.",
    )
    ci95: Interval | None = Field(default=None, description="95 % interval of the ratio.")
    n: PositiveCount | None = Field(default=None, description="Pairs of samples behind the ratio.")
    moves: Annotated[
        list[Moved], BeforeValidator(_as_moves), Field(max_length=4), WithJsonSchema(_MOVES_SCHEMA)
    ] = Field(default_factory=list, description="Measures that it changes: one name or a list.")
    group: GroupName | None = Field(
        default=None,
        description="Entries that only gain together; if one is rejected, all use their defaults.",
    )
    note: Text | None = Field(default=None, description="A note for readers.")

    @model_validator(mode="after")
    def _interval_fits(self) -> SettingEntry:
        why = interval_problem(self.ratio, self.ci95)
        if why:
            raise ValueError(why)
        return self


def _with_maps(settings: Any) -> Any:
    """The map of settings. A plain value, which people write by hand, is refused with the form to write."""
    if not isinstance(settings, dict):
        return settings
    bad = [
        problem(
            f"must be 'default' or a map, such as {{value: {_yaml.flow(entry)[:80]}}}", (str(name),), entry
        )
        for name, entry in settings.items()
        if isinstance(entry, (bool, int, float, str)) and entry != "default"
    ]
    if bad:
        raise ValidationError.from_exception_data("Profile", bad)
    return settings


KernelParam = Annotated[int, Field(ge=-(2**15), le=2**15 - 1)]


class KernelEntry(StrictModel):
    """A kernel configuration for one op and a range of tokens. Further keys are parameters of the variant."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, KernelParam]

    variant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,64}$")] = Field(
        description="Name of the variant."
    )
    ratio: Ratio | None = Field(
        default=None,
        description="Speed of the whole profile / with this entry, or its group, at the default.",
    )
    ci95: Interval | None = Field(default=None, description="95 % interval of the ratio.")
    n: PositiveCount | None = Field(default=None, description="Pairs of samples behind the ratio.")
    group: GroupName | None = Field(default=None, description="As in settings.")
    note: Text | None = Field(default=None, description="A note for readers.")

    @property
    def params(self) -> dict[str, int]:
        """The parameters of the variant by name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def config(self) -> dict[str, str | int]:
        """The configuration (variant and parameters) in the form that `dyno._core.Session` takes."""
        return {"variant": self.variant, **self.params}

    @model_validator(mode="before")
    @classmethod
    def _refuse_near_misses(cls, data: Any) -> Any:
        """Refuse misspelt keys, which would otherwise pass as parameters. Parameters are whole numbers, and
        their names do not resemble a key."""
        if not isinstance(data, dict):
            return data
        keys = cls.keys()
        bad = []
        for key, value in data.items():
            if key in keys:
                continue
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not (isinstance(key, str) and key.isidentifier() and len(key) <= 32):
                bad.append(problem("not the name of a parameter", (str(key),), value))
            elif not is_integer:
                bad.append(
                    problem(
                        f"unknown key with a value that is not a whole number; {suggestion(key, keys)}",
                        (key,),
                        value,
                    )
                )
        if bad:
            raise ValidationError.from_exception_data(cls.__name__, bad)
        return data

    @model_validator(mode="after")
    def _interval_fits(self) -> KernelEntry:
        why = interval_problem(self.ratio, self.ci95)
        if why:
            raise ValueError(why)
        return self


def _entry_tag(value: Any) -> str:
    return "<default>" if isinstance(value, str) else "<entry>"


Default = Annotated[Literal["default"], Tag("<default>")]
SettingOrDefault = Annotated[Annotated[SettingEntry, Tag("<entry>")] | Default, Discriminator(_entry_tag)]
KernelOrDefault = Annotated[Annotated[KernelEntry, Tag("<entry>")] | Default, Discriminator(_entry_tag)]


class Match(StrictModel):
    """The device, model and engine of the measurements; the runtime compares them with its own."""

    device: Device = Field(description="The device.")
    model: ModelIdentity = Field(description="The model.")
    engine: EngineIdentity = Field(description="The engine.")


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a profile: the file that it was read from."""

    path: str
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """Line of each key, by its path."""


_OP_KEY = re.compile(r"[a-z][a-z0-9_]*( [!-~]+)*")
MAX_OP_KEY_LENGTH = 300


def _with_defaults(kernels: Any) -> Any:
    """The map of kernels, with the kernels of its list `default` moved to their op keys."""
    if not isinstance(kernels, dict) or "default" not in kernels:
        return kernels
    spread = {key: ranges for key, ranges in kernels.items() if key != "default"}
    listed = kernels["default"]
    if not isinstance(listed, list):
        raise ValidationError.from_exception_data(
            "Profile", [problem("expected a list of token ranges with op keys", ("default",), listed)]
        )
    bad = []
    for number, item in enumerate(listed):
        tokens, _, key = item.partition(" ") if isinstance(item, str) else ("", "", "")
        ranges = spread.get(key, {})
        if why := _no_kernel(tokens, key):
            bad.append(problem(why, ("default", str(number)), item))
        elif not isinstance(ranges, dict) or tokens in ranges:
            bad.append(problem(f"{item!r} is listed twice", ("default", str(number)), item))
        else:
            spread[key] = {**ranges, tokens: "default"}
    if bad:
        raise ValidationError.from_exception_data("Profile", bad)
    return spread


def _no_kernel(tokens: str, key: str) -> str:
    """The reason why these are not a token range and an op key; empty if they are."""
    if len(key) > MAX_OP_KEY_LENGTH or not _OP_KEY.fullmatch(key):
        return "not a token range and an op key, such as 'm2-8 matmul q4_0 n=4096 k=2048'"
    try:
        parse_tokens(tokens)
    except ValueError as error:
        return str(error)
    return ""


def _describe_list(schema: dict[str, Any]) -> None:
    schema["properties"] = {
        "default": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Kernels that were measured and stay as they are: token range and op key.",
        }
    }


class Profile(StrictModel):
    """Settings and kernel configurations for one device and one model, with the evidence for them."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this format: 1.")
    label: Name = Field(description="A name for people; never compared.")
    match: Match = Field(description="The properties of the machine and the model of the measurements.")
    settings: Annotated[dict[str, SettingOrDefault], BeforeValidator(_with_maps)] = Field(
        default_factory=dict,
        description="By name: `default` (measured; the default wins), or a value with its evidence.",
    )
    kernels: Annotated[
        dict[str, dict[str, KernelOrDefault]],
        BeforeValidator(_with_defaults),
    ] = Field(
        default_factory=dict,
        json_schema_extra=_describe_list,
        description="By op key and token range (`m1`, `m2-8`) a configuration with its proof, or `default`. "
        "`default` as a key has a list of the kernels that stay as they are, each as token range and op key.",
    )
    evidence: Evidence | None = Field(default=None, description="The measurements that prove the values.")
    provenance: Provenance | None = Field(default=None, description="Who made the file, and how.")

    _source: Source | None = PrivateAttr(default=None)

    @property
    def source(self) -> Source | None:
        """The file that it was read from; None if it was made in memory."""
        return self._source

    @property
    def disturbed(self) -> bool:
        """Whether other programs used the machine during the measurements behind its values."""
        return bool(self.evidence and self.evidence.environment and self.evidence.environment.disturbed)

    @property
    def proven(self) -> bool:
        """Whether an entry has a gain that was measured on a quiet machine."""
        return not self.disturbed and any(entry.ratio is not None for _, entry in self.entries())

    @property
    def settles_nothing(self) -> bool:
        """Whether it has no entry and does not prove the defaults either, because other programs used the
        machine."""
        return self.disturbed and not any(self.entries())

    def with_source(self, source: Source) -> Profile:
        """The same profile with `source` as its origin."""
        copy = self.model_copy()
        copy._source = source
        return copy

    def origin(self, *path: str) -> str:
        """File and line of a key, such as `name.yaml:12`; the label if the profile has no file."""
        if self._source is None:
            return self.label
        line = self._source.lines.get(path)
        name = self._source.path.rsplit("/", 1)[-1]
        return f"{name}:{line}" if line is not None else name

    def entries(self) -> Iterator[tuple[str, SettingEntry | KernelEntry]]:
        """All entries except `default`, by path: `settings.ubatch`, `kernels.<op key>.<tokens>`."""
        for name, setting in self.settings.items():
            if isinstance(setting, SettingEntry):
                yield setting_path(name), setting
        for key, ranges in self.kernels.items():
            for tokens, kernel in ranges.items():
                if isinstance(kernel, KernelEntry):
                    yield kernel_path(key, tokens), kernel

    def __eq__(self, other: object) -> bool:
        # The origin of a profile does not count in comparisons.
        return isinstance(other, Profile) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    @field_validator("schema_version", mode="before")
    @classmethod
    def _known_schema(cls, value: Any) -> Any:
        if isinstance(value, bool) or value != SCHEMA_VERSION:
            raise ValueError(f"schema {value!r} is unknown; this version reads schema {SCHEMA_VERSION}")
        return value

    @field_validator("kernels")
    @classmethod
    def _token_ranges(cls, kernels: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        bad = []
        for key, ranges in kernels.items():
            if len(key) > MAX_OP_KEY_LENGTH or not _OP_KEY.fullmatch(key):
                bad.append(problem("not an op key, such as 'matmul q4_0 n=4096 k=2048'", (key,), key))
            seen: list[tuple[int, int, str]] = []
            for tokens in ranges:
                try:
                    low, high = parse_tokens(tokens)
                except ValueError as error:
                    bad.append(problem(str(error), (key, tokens), tokens))
                    continue
                for other_low, other_high, other in seen:
                    if low <= other_high and other_low <= high:
                        bad.append(problem(f"range {tokens!r} overlaps {other!r}", (key, tokens), tokens))
                seen.append((low, high, tokens))
        if bad:
            raise ValidationError.from_exception_data(cls.__name__, bad)
        return kernels

    @model_validator(mode="after")
    def _settings_are_known(self) -> Profile:
        bad = [
            problem(why, ("settings", *where), None)
            for where, why in settings_problems(self.settings, self.match.device.kind, self.match.engine.name)
        ]
        if self.match.engine.name == "dyno" and self.match.engine.ops_revision is None:
            bad.append(problem("missing; the dyno engine has one", ("match", "engine", "ops_revision"), None))
        if bad:
            raise ValidationError.from_exception_data("Profile", bad)
        return self


def settings_problems(
    settings: Mapping[str, SettingEntry | str], device_kind: str, engine: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The problems of `settings` by the table of settings: location below `settings`, and message."""
    for name, entry in settings.items():
        setting = SETTINGS.get(name)
        if setting is None or engine not in setting.engines or not applies_on(setting, device_kind, engine):
            yield (name,), unknown_setting(name, device_kind, engine)
        elif isinstance(entry, SettingEntry):
            why = setting.problem(entry.value, engine)
            if why:
                yield (name, "value"), why
            why = None if entry.default is None else setting.problem(entry.default, engine)
            if why:
                yield (name, "default"), why


def setting_path(name: str) -> str:
    """The path of an entry of `settings` in messages and rejections."""
    return f"settings.{name}"


def kernel_path(op_key: str, tokens: str) -> str:
    """The path of an entry of `kernels` in messages and rejections."""
    return f"kernels.{op_key}.{tokens}"


__all__ = [
    "SCHEMA_VERSION",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "EngineIdentity",
    "Evidence",
    "KernelEntry",
    "Match",
    "ModelIdentity",
    "Profile",
    "Provenance",
    "SettingEntry",
    "Source",
    "kernel_path",
    "setting_path",
    "settings_problems",
]
