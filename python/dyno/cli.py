"""The command `dyno`.

Exit codes: 0 done, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from dyno import _output
from dyno._cli import (
    bench,
    chat,
    experts,
    explain,
    foreign_flags,
    info,
    perplexity,
    plugins,
    profiles,
    run,
    serve,
    state,
)
from dyno._cli.help import CONTEXT, USAGE_ERROR, Group, examples
from dyno._shell import escaped


class _Commands(Group):
    """The commands of `dyno`, the usual ones first."""

    first = ("run", "chat", "serve", "bench", "tune", "profiles", "info")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. If the first one is a model file, the error names the right command."""
        if args and (args[0] in ("-m", "--model") or args[0].endswith(".gguf")):
            raise typer.BadParameter(
                "a command must come first, such as dyno run MODEL -p TEXT, dyno chat MODEL or dyno serve "
                "MODEL",
                param_hint=args[0],
            )
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command. The error for a word of `tune`, of `dyno profiles` or of other programs names the way
        to the same thing."""
        word = args[0]
        if word not in self.commands and (advice := _advice(word)) is not None:
            raise USAGE_ERROR(f"dyno has no command {word!r}; {advice}", ctx)
        return super().resolve_command(ctx, args)


_ELSEWHERE = {
    "help": "use `dyno -h`, or `dyno run -h` for the options of a command",
    "version": "use `dyno --version`, or `dyno info` for the build",
    **dict.fromkeys(("complete", "completion", "generate"), "use `dyno run`"),
    **dict.fromkeys(("cli", "talk"), "use `dyno chat`"),
    **dict.fromkeys(("devices", "list-devices", "system"), "use `dyno info`"),
    **dict.fromkeys(
        ("pull", "download", "get"), "dyno downloads no models. Download the GGUF file, and give its path"
    ),
    **dict.fromkeys(
        ("quantize", "quantise", "convert"),
        "dyno writes no model files. Use llama-quantize or convert_hf_to_gguf.py of llama.cpp",
    ),
}
"""Words that people try as commands, and the way to the same thing."""


def _advice(word: str) -> str | None:
    """The way to the thing that a wrong command means, or None if it is not known."""
    if word in getattr(typer.main.get_command(profiles.app), "commands", ()):
        return f"use `dyno profiles {word}`"
    tuner: Any = typer.main.get_command(plugins.load("tune-app"))
    if word in tuner.commands:
        return f"use `dyno tune {word}`"
    return _ELSEWHERE.get(word)


app = typer.Typer(
    name="dyno",
    no_args_is_help=True,
    cls=_Commands,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run GGUF models with tuned, verified settings.",
    epilog=examples(
        "dyno run model.gguf -p 'def main'",
        "dyno chat model.gguf",
        "dyno serve model.gguf --port 8080",
        "dyno tune model.gguf",
    ),
)
app.command(
    cls=foreign_flags.Command,
    epilog=examples(
        "dyno run model.gguf -p 'def main' -n 64",
        "dyno run model.gguf --chat -p 'How warm is it in Bern?'",
        "dyno run model.gguf --gpu 0 -c 16384 -f prompt.txt",
    ),
)(run.run)
app.command(
    cls=foreign_flags.Command,
    epilog=examples("dyno chat model.gguf", "dyno chat model.gguf -sys 'Be brief.' -c 16384"),
)(chat.chat)
app.command(
    cls=foreign_flags.Command,
    epilog=examples(
        "dyno serve model.gguf --port 8080",
        "dyno serve model.gguf --gpu 0 --sequences 8 -c 16384",
        "dyno serve model.gguf --profile profile.yaml --require-profile",
    ),
)(serve.serve)
app.command(
    cls=foreign_flags.Command,
    epilog=examples(
        "dyno bench model.gguf",
        "dyno bench model.gguf -p 512,4096 -n 128 -ub 512,2048",
        "dyno bench model.gguf -p 0 -n 64 -d 0,4096 -o json",
    ),
)(bench.bench)
app.command(
    cls=foreign_flags.Command,
    epilog=examples(
        "dyno perplexity model.gguf -f text.txt --chunks 40",
        "dyno perplexity model-Q8_0.gguf -f text.txt --save-reference x.npz",
        "dyno perplexity model-Q4_K_M.gguf --reference x.npz",
    ),
)(perplexity.perplexity)
app.command(
    cls=explain.Command,
    epilog=examples(
        "dyno explain gguf model.gguf",
        "dyno explain plan model.gguf -c 16384 --sequences 4",
        "dyno explain ops model.gguf --tokens 512",
    ),
)(explain.explain)
app.command(
    cls=foreign_flags.Command,
    epilog=examples("dyno experts model.gguf --text mine.txt", "dyno experts model.gguf"),
)(experts.experts)
app.command(cls=info.Command, epilog=examples("dyno info", "dyno info --json"))(info.info)
app.add_typer(profiles.app, name="profiles")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: state.Verbose = 0,
) -> None:
    """Options of all commands."""
    state.verbosity(verbose)
    if version:
        from dyno import __version__

        print(f"dyno {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


class _Tune(typer.core.TyperCommand):
    """A command that passes its words and shell completion on to the tuner."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The completions of `tune` itself: options and subcommands."""
        group: Any = typer.main.get_command(plugins.load("tune-app"))
        words = list(ctx.args)
        command = group.commands.get(words[0]) if words else None
        inner = (command or group).make_context("tune", words[1 if command else 0 :], resilient_parsing=True)
        return inner.command.shell_complete(inner, incomplete)


@app.command(
    cls=_Tune,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Find the fastest settings for a model on this machine, and write a profile. The same as `tune`.",
)
def tune(context: typer.Context) -> None:
    """Pass everything on to the tuner."""
    main = plugins.load("tune")
    sys.argv = ["dyno tune", *context.args]
    main()


def main() -> None:
    """Run the command line and exit."""
    from dyno.errors import DynoError

    state.configure_logging()
    try:
        with _output.flushed():
            app(prog_name="dyno")  # the name for shell completion
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of stdout has gone
        _output.discard()
        sys.exit(1)
    except (DynoError, OSError, UnicodeError, MemoryError, ImportError, ValueError) as error:
        _fail(_one_line(error), 1)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return _output.FULL
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _fail(message: str, code: int) -> None:
    if state.verbosity():
        traceback.print_exc()
    print(f"error: {escaped(message)}", file=sys.stderr)
    _output.leave(code)
