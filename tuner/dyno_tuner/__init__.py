"""Find, prove and write down the fastest settings."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gguf-dyno")
except PackageNotFoundError:  # run from a source tree: both are one project
    from dyno import __version__ as __version__
