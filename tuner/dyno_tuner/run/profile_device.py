"""The device of a profile that is verified: whether this build and machine have one of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno.devices import resolve_device
from dyno.errors import DeviceError

from ..core.errors import TuneError

if TYPE_CHECKING:
    from dyno import profiles


def check_device(profile: profiles.Profile, kind: str) -> None:
    """Raises TuneError if this build or machine has no device of the profile's kind."""
    try:
        resolve_device(kind)
    except DeviceError as error:
        why = str(error).removeprefix("[device] ").partition("; ")[0]
        raise TuneError(
            f"the profile ({profile.label}) is for {kind} devices, and none can be used here: {why}; verify "
            "it on a machine of its kind"
        ) from error
