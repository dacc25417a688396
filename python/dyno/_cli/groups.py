"""Groups of options that several commands share. Each group is a dataclass whose fields are options."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from dyno._cli import options

if TYPE_CHECKING:
    from collections.abc import Callable


class Group:
    """The base class of all groups, by which `grouped` finds them."""

    section: ClassVar[str]
    """The title of the group in --help. An option with its own section is listed there instead."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator that turns a command into a function for typer. The fields of a group replace the parameter
    with its type."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Group)
    }
    found: dict[str, tuple[Any, Any]] = {}  # annotation and default of each option
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            annotations = get_type_hints(groups[name], include_extras=True)
            found |= {
                field.name: (_in_section(annotations[field.name], groups[name].section), field.default)
                for field in fields(groups[name])
            }
        else:
            found[name] = (hints[name], parameter.default)

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    spread.__annotations__ = {name: annotation for name, (annotation, _) in found.items()}
    spread.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in found.items()
        ]
    )
    return spread


def _in_section(annotation: Any, section: str) -> Any:
    """The annotation of an option under the title `section` in --help."""
    kind, option = get_args(annotation)[:2]
    option = copy.copy(option)
    option.rich_help_panel = option.rich_help_panel or section
    return Annotated[kind, option]


@dataclass(frozen=True, kw_only=True)
class SessionOptions(Group):
    """The session settings that have their own option."""

    section = options.SPEED

    ubatch: options.Ubatch = None
    threads: options.Threads = None
    threads_batch: options.ThreadsBatch = None
    kv_type_k: options.KvTypeK = None
    kv_type_v: options.KvTypeV = None

    def given(self) -> dict[str, Any]:
        """A dict from setting to value, or None if the option was not given."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Group):
    """The options for opening an engine: device, placement, profile, and settings by name."""

    section = options.DEVICES

    device: options.Device = "auto"
    gpu: options.Gpu = None
    override_tensor: options.OverrideTensor = None
    n_gpu_layers: options.GpuLayers = None
    cpu_moe: options.CpuMoe = None
    n_cpu_moe: options.NCpuMoe = None
    virtual_devices: options.VirtualDevices = None
    vram: options.Vram = None
    ram: options.Ram = None
    split_mode: options.SplitMode = None
    tensor_split: options.TensorSplit = None
    numa: options.Numa = None
    profile: options.ProfileFile = None
    no_profile: options.NoProfile = False
    require_profile: options.RequireProfile = False
    force_profile: options.ForceProfile = False
    set_: options.Set = None

    @property
    def device_name(self) -> str:
        """`--device` and `--gpu` as one name."""
        return options.device_argument(self.device, self.gpu)

    def arguments(self, **named: Any) -> dict[str, Any]:
        """The arguments of `Engine`, except the file and the device.

        Args:
            named: settings with their own option in the command; None: not given.

        Raises:
            typer.BadParameter: An option cannot be parsed, or contradicts another one.
        """
        chosen = options.profile_argument(
            self.profile, self.no_profile, self.require_profile, self.force_profile
        )
        chosen |= self.placement()
        return options.once(
            chosen, options.settings(self.set_, numa=options.numa_argument(self.numa), **named)
        )

    def placement(self) -> dict[str, Any]:
        """The placement options as arguments of `Engine`, without options that were not given.

        Raises:
            typer.BadParameter: `-ngl` is neither a number nor `all`, or a virtual device, an amount of memory
            or a share cannot be parsed.
        """
        from dyno._memory_size import parse_limit
        from dyno._setting import split_rules
        from dyno._virtual_devices import parse_virtual_devices

        layers, shares_text = self.n_gpu_layers, self.tensor_split
        if layers not in (None, "all") and not (layers or "").isdecimal():
            several = "; one run takes one value" if "," in layers else ""
            raise typer.BadParameter(
                f"{layers!r} is neither a number of layers nor all{several}", param_hint="-ngl"
            )
        try:
            devices = parse_virtual_devices(self.virtual_devices) if self.virtual_devices else 0
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--virtual-devices") from error
        for option, size in (("--vram", self.vram), ("--ram", self.ram)):
            try:
                _ = size is None or parse_limit(size)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=option) from error
        if self.split_mode not in (None, "none", "layer"):
            raise typer.BadParameter(f"{self.split_mode!r}; dyno has none and layer", param_hint="-sm")
        try:
            shares = [float(share) for share in (shares_text or "").split(",") if share]
        except ValueError as error:
            raise typer.BadParameter(f"{shares_text!r} is not N,N,…", param_hint="-ts") from error
        rules = [rule for text in self.override_tensor or [] for rule in split_rules(text)]
        given = {
            "placement": rules or None,
            "n_gpu_layers": None if layers is None else -1 if layers == "all" else int(layers),
            "cpu_moe": self.cpu_moe,
            "n_cpu_moe": self.n_cpu_moe,
            "virtual_devices": devices or None,
            "vram": self.vram,
            "ram": self.ram,
            # Shares imply a split; as in llama.cpp, the default mode is `layer`.
            "split": self.split_mode or ("layer" if shares else None),
            "tensor_split": shares or None,
        }
        return {name: value for name, value in given.items() if value is not None}
