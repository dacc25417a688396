"""The class of a setting, with its name, type, range, default and effects. The table is in
`_settings_table`."""

from __future__ import annotations

import difflib
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SettingValue = bool | int | float | str | list[str]
Kind = Literal["build", "load", "context", "session", "scheduler"]
ValueType = Literal["bool", "int", "float", "choice", "rules"]
Fidelity = Literal["exact", "rounding", "approx"]
Moves = Literal["pp", "tg", "memory"]
RanksBy = Literal["bandwidth", "tile", "cores"]

CPU_AND_CUDA: Final = frozenset({"cpu", "cuda"})
CPU: Final = frozenset({"cpu"})
CUDA: Final = frozenset({"cuda"})
DYNO: Final = frozenset({"dyno"})
GGML_ENGINES: Final = frozenset({"llama.cpp", "ik_llama.cpp"})
ALL_ENGINES: Final = DYNO | GGML_ENGINES
ENGINES: Final = ("dyno", "llama.cpp", "ik_llama.cpp")

MAX_TOKENS: Final = 1 << 24
"""Upper bound of all settings that count tokens."""
MAX_RULES: Final = 256
MAX_RULE_LENGTH: Final = 512


@dataclass(frozen=True, slots=True)
class DefaultsFor:
    """The facts that computed defaults depend on."""

    cores: int = 1
    """Number of CPU cores that this process may run on."""
    n_ctx_train: int = 4096
    """Context length that the model was made for, in tokens."""
    numerics: str = "default"
    """Value of the setting `numerics`: `exact` keeps the KV cache in f32."""
    threads: int | None = None
    """Value of the setting `threads`, if the caller gave one."""
    latent_cache: bool = False
    """Whether the KV cache holds the latents of multi-head latent attention."""
    dense_quantised: bool = False
    """Whether the model has no experts, and most of its weights are quantised."""
    compute_capability: int = 0
    """Compute capability of the GPU, times ten; 0: unknown, or a CPU."""
    ubatch: int = 512
    """Default u-batch of the device and the model; see `dyno._ubatch`."""
    sequences: int = 1
    """Number of sequences that the user of the engine needs at least; a server needs several."""
    cuda_graphs: bool = True
    """Whether this build can capture CUDA graphs (GGML_CUDA_USE_GRAPHS)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its name, its values and its effects."""

    name: str
    kind: Kind
    """The time at which it can change: with another build, a reload of the weights, a new context, between
    two calls, or when a scheduler is opened."""
    type: ValueType
    doc: str
    """One sentence for `--help`, error messages and the reference page."""
    default: SettingValue | Callable[[DefaultsFor], SettingValue]
    """The engine's default, or a function that computes it."""
    default_doc: str = ""
    """The rule for the default in words, if it is computed."""
    minimum: int = 0
    """Smallest value of an `int` or a `float`."""
    maximum: int = MAX_TOKENS
    """Largest value of an `int` or a `float`."""
    choices: tuple[str, ...] = ()
    """Values of a `choice`."""
    foreign_choices: tuple[str, ...] = ()
    """Further values that only engines other than dyno have."""
    unit: str = ""
    """Unit of an `int`."""
    devices: frozenset[str] = CPU_AND_CUDA
    """Kinds of device on which it has an effect in dyno. Other engines decide for themselves."""
    engines: frozenset[str] = DYNO
    """Engines that have it. Each target has its own spelling."""
    memory_bound: bool = False
    """Whether memory limits the value. Such a value is never used on another machine or model without a check
    that it fits."""
    fidelity: Fidelity = "exact"
    """exact: same bits; rounding: same mathematics in another order; approx: other answers."""
    moves: tuple[Moves, ...] = field(default=("pp", "tg"))
    """The measures that it changes: prompt processing, generation, memory."""
    ranks_by: RanksBy = "tile"
    """The property that decides whether a value of another machine is plausible: bandwidth, the instruction
    set or compute capability, or the number of cores (which must be the same)."""

    def default_value(self, given: DefaultsFor | None = None) -> SettingValue:
        """The default for a machine and a model."""
        if callable(self.default):
            return self.default(given if given is not None else DefaultsFor())
        return list(self.default) if isinstance(self.default, list) else self.default

    def problem(self, value: object, engine: str = "dyno") -> str | None:
        """The reason why `value` is not valid for this setting in an engine; None if it is valid."""
        if self.type == "bool":
            return None if isinstance(value, bool) else f"must be true or false, not {_show(value)}"
        if self.type == "int":
            if isinstance(value, bool) or not isinstance(value, int):
                return f"must be a whole number, not {_show(value)}"
            if not self.minimum <= value <= self.maximum:
                return f"must be from {self.minimum} to {self.maximum}, not {value}"
            return None
        if self.type == "float":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return f"must be a number, not {_show(value)}"
            if not self.minimum <= value <= self.maximum:  # so is no value that is not a number
                return f"must be from {self.minimum} to {self.maximum}, not {value}"
            return None
        if self.type == "choice":
            choices = self.choices if engine == "dyno" else self.choices + self.foreign_choices
            if isinstance(value, str) and value in choices:
                return None
            near = closest(value, choices) if isinstance(value, str) else None
            hint = f"; did you mean {near!r}?" if near else ""
            return f"must be one of {', '.join(choices)}, not {_show(value)}{hint}"
        return _rules_problem(value, engine)

    def parse(self, text: str, engine: str = "dyno") -> SettingValue:
        """Parse a value from a command line.

        Raises:
            ValueError: `text` is not a valid value. The message names the valid ones.
        """
        value: SettingValue = text
        if self.type == "bool":
            value = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}.get(
                text.lower(), text
            )
        elif self.type == "int" and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            value = int(text)
        elif self.type == "float" and re.fullmatch(r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})", text):
            value = float(text)
        elif self.type == "choice":
            value = text.lower()
        elif self.type == "rules":
            value = split_rules(text)
        why = self.problem(value, engine)
        if why is not None:
            raise ValueError(f"{self.name}: {why}")
        return value

    def values_doc(self) -> str:
        """The valid values in words."""
        if self.type == "bool":
            return "true, false"
        if self.type in ("int", "float"):
            unit = f" {self.unit}" if self.unit else ""
            return f"{self.minimum} to {self.maximum}{unit}"
        if self.type == "choice":
            return ", ".join(self.choices)
        return "list of `REGEX=DEVICE` (cpu, cuda:N; in dyno also cpu:N)"

    def defaults_doc(self) -> str:
        """The default in words."""
        if callable(self.default):
            return self.default_doc
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        return "none" if self.default == [] else str(self.default)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,2}")
_DEVICE_OF_DYNO = re.compile(r"cpu(:[0-9]{1,2})?|cuda:[0-9]{1,2}")


def split_rules(text: str) -> list[str]:
    """Split placement rules at commas.

    A comma inside a regular expression, as in {1,2}, is not one: a rule ends with `=DEVICE`.
    """
    rules: list[str] = []
    pending = ""
    for piece in text.split(","):
        pending = f"{pending},{piece}" if pending else piece
        if re.search(r"=[\w:]*$", pending):
            rules.append(pending)
            pending = ""
    return [*rules, pending] if pending else rules


def _rules_problem(value: object, engine: str) -> str | None:
    known = _DEVICE_OF_DYNO if engine == "dyno" else _DEVICE
    if not isinstance(value, list) or not all(isinstance(rule, str) for rule in value):
        return f"must be a list of 'REGEX=DEVICE', not {_show(value)}"
    if len(value) > MAX_RULES:
        return f"holds {len(value)} rules; at most {MAX_RULES}"
    for rule in value:
        pattern, sep, device = rule.rpartition("=")
        if not sep or not pattern or not known.fullmatch(device):
            return f"rule {_show(rule)} must read 'REGEX=DEVICE' with a device cpu or cuda:N"
        if len(rule) > MAX_RULE_LENGTH:
            return f"rule {_show(rule)} is longer than {MAX_RULE_LENGTH} characters"
        try:
            with warnings.catch_warnings():  # of Python, about classes such as [[:alpha:]]
                warnings.simplefilter("ignore", FutureWarning)
                re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return f"rule {_show(rule)}: bad regular expression: {error}"
    return None


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`; None if none reaches the similarity `cutoff` (0: any, 1:
    equal)."""
    candidates = {item.lower().replace("-", "_"): item for item in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), candidates, n=1, cutoff=cutoff)
    return candidates[found[0]] if found else None


def suggestion(name: str, known: Iterable[str], where: str = "") -> str:
    """The end of a message about an unknown name: the most similar valid name, or else all valid names.

    Args:
        name: The unknown name.
        known: The valid names.
        where: Words to print instead of all names, which say where to find them.
    """
    known = list(known)
    near = closest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if not known:
        return "no name is valid here"
    return where or f"valid names: {', '.join(known)}"
