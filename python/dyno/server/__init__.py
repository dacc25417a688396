"""An HTTP server for one engine, with the public chat API (`pip install 'gguf-dyno[serve]'`)."""

from __future__ import annotations

from dyno.server.app import Options, create_app

__all__ = ["Options", "create_app"]
