"""Groups of options that several commands share: a dataclass each, whose fields are the options."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

from dyno._cli import options

if TYPE_CHECKING:
    from collections.abc import Callable


class Group:
    """The base of all groups; `grouped` finds them by it."""

    section: ClassVar[str]
    """The title of the group in --help. An option that names a section of its own stands there."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: the fields of a group take the place of a parameter with its type."""
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
    """The annotation of an option that stands under the title `section` in --help."""
    kind, option = get_args(annotation)[:2]
    option = copy.copy(option)
    option.rich_help_panel = option.rich_help_panel or section
    return Annotated[kind, option]


@dataclass(frozen=True, kw_only=True)
class SessionOptions(Group):
    """The settings of a session that have an option of their own."""

    section = options.SPEED

    ubatch: options.Ubatch = None
    threads: options.Threads = None
    threads_batch: options.ThreadsBatch = None
    kv_type_k: options.KvTypeK = None
    kv_type_v: options.KvTypeV = None

    def given(self) -> dict[str, Any]:
        """Setting -> value, or None if the option was not given."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Group):
    """The options by which a command opens its engine: device, placement, profile, and settings by name."""

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
        """The arguments of `Engine` beside the file and the device.

        Args:
            named: settings that the command has options for; None: not given.

        Raises:
            typer.BadParameter: An option cannot be read, or contradicts another one.
        """
        chosen = options.profile_argument(
            self.profile, self.no_profile, self.require_profile, self.force_profile
        )
        chosen |= options.placement_arguments(
            self.override_tensor,
            self.n_gpu_layers,
            self.cpu_moe,
            self.n_cpu_moe,
            self.virtual_devices,
            self.vram,
            self.ram,
            self.split_mode,
            self.tensor_split,
        )
        return options.once(
            chosen, options.settings(self.set_, numa=options.numa_argument(self.numa), **named)
        )
