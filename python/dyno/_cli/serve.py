"""`dyno serve`: an HTTP server with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from dyno._cli import drawing, groups, options, state
from dyno._cli.help import finite

if TYPE_CHECKING:
    from dyno.server.opening import Recipe

_Address: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"
"""An address of IPv4 or IPv6 with a port."""


@groups.grouped
def serve(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on. 0: choose a free port.", min=0, max=65535)
    ] = 8080,
    port_file: Annotated[
        Path | None,
        typer.Option("--port-file", help="Write the port number to this file when the server is ready."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar="DYNO_API_KEY", help="API key that each request must send as a bearer token."
        ),
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option("--alias", "-a", help="Model name to use in the API. Default: the file name."),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            "--parallel",
            "-np",
            help="Number of requests to generate in parallel. Default: the value of the profile, or 4.",
            min=1,
        ),
    ] = None,
    queue: Annotated[
        int,
        typer.Option(
            "--queue", help="Maximum number of waiting requests. Further requests get status 429.", min=0
        ),
    ] = 64,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="End a request after this many seconds, even if it is incomplete.",
            min=0.001,
            callback=finite,
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            "--step-tokens",
            help="Maximum number of tokens in one step of the server, over all prompts and answers. "
            "Default: the value of the profile, or that of ubatch.",
            min=1,
        ),
    ] = None,
    model_draft: Annotated[
        Path | None,
        typer.Option(
            "--model-draft",
            "-md",
            rich_help_panel="Speculation",
            help="GGUF file of a smaller model with the same vocabulary, which drafts tokens.",
        ),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            "--spec",
            rich_help_panel="Speculation",
            help="Source of drafts. ngram: repetitions in the text; draft: the model of --model-draft; "
            "mtp: the multi-token prediction head of the model; off: no drafts. Default: draft if "
            "--model-draft is given, otherwise the value of the profile, or off.",
        ),
    ] = None,
    spec_max: Annotated[
        int | None,
        typer.Option(
            "--spec-max",
            "--draft-max",
            rich_help_panel="Speculation",
            help="Maximum length of a draft in tokens. Default: the value of the profile, or 8.",
            min=1,
            max=64,
        ),
    ] = None,
    spec_min_p: Annotated[
        float | None,
        typer.Option(
            "--spec-min-p",
            "--draft-p-min",
            rich_help_panel="Speculation",
            help="End a draft at a token less probable than this. Default: the value of the profile, or 0.5.",
            min=0,
            max=1,
        ),
    ] = None,
    ray: Annotated[
        int | None,
        typer.Option(
            "--ray",
            metavar="N",
            help="Serve N replicas with Ray Serve. Needs gguf-dyno[serve,ray].",
            min=1,
        ),
    ] = None,
    max_body: Annotated[
        float,
        typer.Option("--max-body", help="Maximum size of a request body in MiB.", min=0.001, callback=finite),
    ] = 8.0,
    body_timeout: Annotated[
        float,
        typer.Option(
            "--body-timeout",
            help="Reject a request whose body takes longer than this many seconds to arrive.",
            min=0.001,
            callback=finite,
        ),
    ] = 60.0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            help="After SIGTERM or Ctrl-C, cut off requests that take longer than this many seconds. With "
            "--ray, the end can take 10 s more.",
            min=0.001,
            callback=finite,
        ),
    ] = 60.0,
    strict_fields: Annotated[
        bool,
        typer.Option(
            "--strict-fields",
            help="Reject requests that have unknown fields. Default: ignore these fields and log their "
            "names.",
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Without an API key, accept requests that address the server by this host name, such as "
            "that of a reverse proxy. Loopback names always work. *: accept all names. Can be repeated.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Allow browser pages from this origin, such as https://chat.example, to call the server. "
            "*: allow all origins. Can be repeated.",
        ),
    ] = None,
    chat_template: drawing.ChatTemplateName = None,
    ctx: options.Ctx = None,
    *,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic and a chat page for the browser.

    After SIGTERM or Ctrl-C, the server finishes running requests before it exits. A second Ctrl-C ends it at
    once.
    """
    state.verbosity(verbose)
    if spec is None and model_draft is not None:
        spec = "draft"
    if spec not in (None, "off", "ngram", "draft", "mtp"):
        raise typer.BadParameter(f"--spec is {spec!r}; expected ngram, draft, mtp or off")
    if spec == "draft" and model_draft is None:
        raise typer.BadParameter("--spec draft needs a draft model; give it with --model-draft FILE")
    if api_key is not None and not api_key.strip():
        raise typer.BadParameter(
            "--api-key is empty, which would accept every request; give a key, or omit the option"
        )
    if step_tokens is not None and sequences is not None and step_tokens < sequences:
        raise typer.BadParameter(
            f"--step-tokens is {step_tokens}; expected at least one for each of the {sequences} --sequences"
        )
    path = options.model_argument(model_file, model)
    arguments = opening.arguments(
        sequences=sequences,
        ctx=options.ctx_argument(ctx, path),
        **session.given(),
        step_tokens=step_tokens,
        spec=spec,
        spec_max=spec_max,
        spec_min_p=spec_min_p,
    )
    try:
        import uvicorn

        from dyno.server import Options
        from dyno.server.connections import Connection
        from dyno.server.ending import EndingServer
        from dyno.server.opening import Recipe, opened
        from dyno.server.options import KEEP_ALIVE_S
    except ImportError as error:
        raise ImportError(f"{error.name} is missing; pip install 'gguf-dyno[serve]'") from error

    recipe = Recipe(
        model=str(path.resolve()),
        options=Options(
            model=alias or path.stem,
            api_key=api_key,
            max_waiting=queue,
            max_body_bytes=int(max_body * 2**20),
            body_timeout_s=body_timeout,
            timeout_s=timeout,
            strict_fields=strict_fields,
            allowed_hosts=tuple(allow_host or ()),
            cors_origins=tuple(cors_origin or ()),
        ),
        device=opening.device_name,
        arguments=arguments,
        draft=None if model_draft is None else str(model_draft.resolve()),
        chat_template=chat_template,
    )
    if port_file is not None:
        _check_port_file(port_file)
    address = _resolved(host, port)
    recipe = _named(recipe, host, address[0])
    if ray is not None:
        if address[3:] not in ((), (0,)):
            raise typer.BadParameter(
                f"--host {host} is an address of one network interface, which Ray Serve cannot bind; give "
                "another address of this machine, or :: for all of them",
                param_hint="--ray",
            )
        _serve_replicas(recipe, ray, host, address, port_file, drain_timeout)
        return
    # Bind the address first, since loading a model can take a minute.
    with _bound(host, address) as listening, opened(recipe) as (engine, app):
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=Connection,
            ws="none",  # a connection with another protocol would not know whether it is busy
            log_level="info" if verbose else "warning",
            access_log=bool(verbose),
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        try:
            listening.listen(config.backlog)  # a reader of the line or file below can connect at once
        except OSError as error:
            raise _unusable(host, port, error) from error
        state.print_choices(engine)
        print(
            f"serving {recipe.options.model}: {engine.settings['sequences']} requests in parallel, "
            f"context of {engine.settings['ctx']} tokens each",
            file=sys.stderr,
        )
        _tell(host, int(listening.getsockname()[1]), port_file)
        EndingServer(config, app.state.scheduler, drain_timeout).run(sockets=[listening])


def _named(recipe: Recipe, host: str, address: str) -> Recipe:
    """A recipe whose server knows its names, given the address to which --host leads.

    Prints a warning if other machines reach the address and no key is set.
    """
    from dyno.server.hosts import host_name, is_loopback

    given = recipe.options
    alone = is_loopback(address)
    if given.api_key is None and not alone:
        print(
            f"warning: --host {host} accepts connections from other machines and no API key is set; anyone "
            "who can reach the port can use the model. To require a key, give --api-key KEY",
            file=sys.stderr,
        )
    if not alone and not given.allowed_hosts:
        return recipe
    names = (*given.allowed_hosts, host_name(host))
    return dataclasses.replace(
        recipe, options=dataclasses.replace(given, listens=address, allowed_hosts=names)
    )


def _serve_replicas(
    recipe: Recipe, count: int, host: str, address: _Address, port_file: Path | None, drain_s: float
) -> None:
    """Serve through Ray until SIGTERM or Ctrl-C."""
    from dyno.devices import resolve_device
    from dyno.server.ending import end_at_once
    from dyno.server.replicas import replicas

    on_gpu = resolve_device(recipe.device).name.startswith("cuda")
    if on_gpu:  # in each replica Ray shows one GPU, as number 0
        recipe = dataclasses.replace(recipe, device="cuda:0")
    port = address[1]
    if port == 0:
        with socket.create_server((address[0], 0), family=_family(address)) as free:
            port = int(free.getsockname()[1])
    ends = threading.Event()
    cpus = float(recipe.arguments.get("threads", 1))

    def end(sig: int, _: object) -> None:
        if ends.is_set() and sig == signal.SIGINT:
            end_at_once(sig)
        ends.set()

    with replicas(recipe, count, address[0], port, gpus=float(on_gpu), cpus=cpus, drain_s=drain_s):
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, end)
        print(f"serving {Path(recipe.model).name} with {count} replicas", file=sys.stderr)
        _tell(host, port, port_file)
        ends.wait()


def _resolved(host: str, port: int) -> _Address:
    """The address to which a host leads, as `bind` takes it.

    Addresses of IPv4 come first, as clients expect it of localhost.

    Raises:
        OSError: The host leads to no address.
    """
    try:
        found = socket.getaddrinfo(_bare(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        behind = host.rpartition(":")[2] if host.count(":") == 1 else ""
        port_too = f"; write --port {behind} for the port" if behind.isdecimal() else ""
        raise OSError(
            f"--host {host!r} leads to no address{port_too}; give an address or a name of this machine, such "
            "as 127.0.0.1, ::1 or localhost, or 0.0.0.0 for all of its addresses"
        ) from error
    address: Any = min(found, key=lambda each: each[0] != socket.AF_INET)[4]
    return cast("_Address", address)


def _family(address: _Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _bound(host: str, address: _Address) -> socket.socket:
    """A socket that is bound to the address of a host but does not listen yet.

    Raises:
        OSError: The port is in use, or the address does not belong to this machine.
    """
    bound = socket.socket(_family(address))
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unusable(host, address[1], error) from error
    return bound


def _unusable(host: str, port: int, error: OSError) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return OSError(f"--port {port} is in use by another program; give another port, or 0 for a free one")
    return OSError(f"--host {host} --port {port}: {error.strerror or error}")


def _tell(host: str, port: int, port_file: Path | None) -> None:
    print(f"listening on http://{_in_url(host)}:{port}", flush=True)
    if port_file is not None:
        _write(port_file, f"{port}\n")


def _bare(host: str) -> str:
    """A host without the brackets that an address of IPv6 has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _in_url(host: str) -> str:
    host = _bare(host)
    return f"[{host}]" if ":" in host else host


def _check_port_file(path: Path) -> None:
    """Raises OSError if the file cannot be written, before a model is read."""
    if path.is_dir():
        raise OSError(f"--port-file {path} is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise OSError(f"--port-file {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(f"--port-file {path}: no file can be written into the folder {path.parent}")


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # if the folder is not writable
            part.unlink()
        raise OSError(f"--port-file {path}: {error.strerror or error}") from error
