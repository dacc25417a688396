"""Several replicas of a server behind one address, through Ray Serve.

Each replica is a process with its own engine, and needs the memory of one. Ray places the replicas,
distributes requests among them, and replaces a replica that has died. The model is read from the same path on
all nodes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

from dyno.errors import DynoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette

    from dyno.server.opening import Recipe

__all__ = ["replicas"]

_NAME = "dyno"
_LAST_WORK_S = 10.0
"""Seconds in which Ray ends replicas whose time is over."""


def _builder(recipe: Recipe) -> Callable[[], Starlette]:
    """Make the application of one replica, in its own process."""

    def build() -> Starlette:
        from dyno.server.opening import opened

        # Ray sets it to the CPUs that it reserves for an actor, which must not limit the engine.
        os.environ.pop("OMP_NUM_THREADS", None)
        stack = contextlib.ExitStack()
        _, app = stack.enter_context(opened(recipe))
        app.state.opened = stack  # stays open until the process ends
        return app

    return build


def _drain(serve: Any, seconds: float) -> None:
    """Let running requests end. `serve.shutdown` alone gives them 30 s at most."""
    serve.delete(_NAME, _blocking=False)
    end = time.monotonic() + seconds + _LAST_WORK_S
    while _NAME in serve.status().applications and time.monotonic() < end:
        time.sleep(0.1)


@contextlib.contextmanager
def replicas(
    recipe: Recipe,
    count: int,
    host: str,
    port: int,
    gpus: float,
    cpus: float,
    drain_s: float,
    **cluster: Any,
) -> Iterator[None]:
    """Replicas of a server behind one address while the context is open.

    Args:
        recipe: The recipe of each replica, with absolute paths.
        count: Number of replicas.
        host: Address to listen on.
        port: Port to listen on.
        gpus: GPUs per replica.
        cpus: CPUs per replica.
        drain_s: Seconds that running requests get at the end.
        **cluster: Arguments of `ray.init`. Without an address, RAY_ADDRESS names the cluster, or one is
            started on this machine.

    Raises:
        ImportError: Ray is not installed.
        DynoError: The replicas do not start.
    """
    try:
        ray: Any = importlib.import_module("ray")
        serve: Any = importlib.import_module("ray.serve")
    except ImportError as error:
        raise ImportError(f"{error.name} is missing; pip install 'gguf-dyno[serve,ray]'") from error
    begun = not ray.is_initialized()
    if begun:
        ray.init(logging_level="warning", **cluster)
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
        deployment = serve.deployment(
            serve.ingress(_builder(recipe))(),
            name=_NAME,
            num_replicas=count,
            ray_actor_options={"num_gpus": gpus, "num_cpus": cpus},
            graceful_shutdown_timeout_s=drain_s,
            # The replica itself refuses requests beyond its queue.
            max_ongoing_requests=recipe.options.max_waiting + 1024,
        )
        try:
            serve.run(deployment.bind(), name=_NAME, route_prefix="/")
        except Exception as error:
            raise DynoError(f"[serve] the replicas did not start: {error}") from error
        try:
            yield
        finally:
            _drain(serve, drain_s)
    finally:
        serve.shutdown()
        if begun:
            ray.shutdown()
