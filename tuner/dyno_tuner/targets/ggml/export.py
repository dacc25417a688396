"""Exports of a profile of llama.cpp or ik_llama.cpp as a command line, an environment file or a systemd unit,
with the flags of the binary that will run it.

If the profile was tuned from a user's command line, only the settings that the profile changes differ from
it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import TYPE_CHECKING

import typer
from dyno import profiles
from dyno._shell import escaped, shell_word

from ...core.errors import TuneError
from ...core.recorded_command import held_with, recorded, values_of
from ...core.redaction import HIDDEN, names_secret, redact_words
from .. import declared
from . import deployment
from .applicability import named_policy
from .command_line import Command, parse_command, same_model
from .help import Flag, Help
from .installation import Installation
from .server import own_defaults
from .spelling import NoSpelling, Spelled, rules_text, spell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ...core.protocol import Value

_OFF = ("-nr", "-nkvo")
FORMS = ("llama-server", "env", "systemd", "compose", "helm-values", "models.ini")


def tuned_with(profile: profiles.Profile) -> tuple[str | None, str | None, list[str]]:
    """The folder of the binaries, the model and the user's command line, read from the command that made a
    profile."""
    words, own = recorded(profile)
    folders, models = values_of(words, "--bin"), values_of(words, "--model", "-m")
    # A model without an option name; no value of another option is a file of this kind.
    models = models or [word for word in words if word.endswith(".gguf") and not word.startswith("-")]
    return folders[-1] if folders else None, models[-1] if models else None, own


def binaries_folder(path: Path, profile: profiles.Profile, given: str | None) -> str:
    """The folder whose programs are run for a profile: the given one, or the recorded one after the user
    confirms it. Without confirmation, the author of a profile could choose a program to run on this machine.

    Raises:
        TuneError: no folder is given, and the recorded one is missing, relative, or not confirmed.
    """
    if given is not None:
        return given
    shown, engine = escaped(str(path)), profile.match.engine.name
    recorded = tuned_with(profile)[0]
    if recorded is None:
        raise TuneError(f"profile {shown} belongs to {engine}; give --bin, the folder of its binaries")
    if not os.path.isabs(recorded):
        raise TuneError(
            f"profile {shown} records the relative folder '{escaped(recorded)}', "
            "which may be another one here; give --bin, the folder of its binaries"
        )
    option = f"--bin {shell_word(recorded)}"
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        question = f"profile {shown} was tuned with programs in {escaped(recorded)}; run them?"
        if typer.confirm(question, default=False, err=True):
            return recorded
        raise TuneError(f"the programs of the profile were not run; give --bin, or confirm {option}")
    raise TuneError(
        f"profile {shown} was tuned with programs in {escaped(recorded)}, "
        f"which do not run without your consent; if you trust them, give {option}"
    )


def _visible(profile: profiles.Profile, install: Installation) -> dict[str, str | None]:
    """The variable that limits a process to the tuned GPUs, as in every measurement."""
    words, _ = recorded(profile)
    named = [*values_of(words, "--gpu"), *values_of(words, "--device")]
    numbers = re.fullmatch(r"(?:cuda:)?([0-9]+(?:,[0-9]+)*)", named[0]) if named else None
    if profile.match.device.kind == "cpu":
        # A build without CUDA sees no GPU anyway.
        hide = install.reads_variable("GGML_CUDA_DISABLE_GRAPHS")
        return {"CUDA_VISIBLE_DEVICES": ""} if hide else {}
    if numbers is None:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers[1]}


def _as_measured(profile: profiles.Profile, own: Command, help_: Help) -> list[str]:
    """The words that each measured run got beside the settings, unless the user's command line replaced them.
    Without them, llama.cpp places layers itself."""
    args: list[str] = []
    if help_.has("-ngl") and "-ngl" not in own.named:
        args += ["-ngl", "0" if profile.match.device.kind == "cpu" else "999"]
    if help_.has("-fit") and "-fit" not in own.named:
        args += ["-fit", "off"]
    return args


def _own_values(
    profile: profiles.Profile, own: Command, held: Mapping[str, Value], tell: Callable[[str], None]
) -> dict[str, Value]:
    """Values of the user's command line for which the profile has no better ones. Only a complete tune shows
    that a `default` is at least as good."""
    status = profile.provenance.status if profile.provenance else None
    kept: dict[str, Value] = {}
    for name, value in own.incumbent.items():
        entry = profile.settings.get(name)
        if isinstance(entry, profiles.SettingEntry) or name in held:
            continue
        if entry is not None and status == "complete":
            tell(f"{name}: {value} of the command line is omitted, because the default was as fast")
            continue
        ended = (
            f"the tune ended with status {status!r}"
            if status
            else "the profile does not record how the tune ended"
        )
        why = "no tune has searched it" if entry is None else f"{ended}, so its default is not proven"
        tell(f"{name}: {value} of the command line stays: {why}")
        kept[name] = value
    return kept


def export(
    profile: profiles.Profile, form: str, *, binaries: str, model: str, command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> str:  # fmt: skip
    """The profile as text for a shell, an `EnvironmentFile` or a systemd unit.

    Args:
        form: one of `FORMS`.
        binaries: folder of the engine's llama-server, whose `--help` decides the flags.
        model: path of the model that the server loads.
        command: the user's command line; settings of the profile replace its flags.
        tell: called with a line about each word of `command` that changes.

    Raises:
        TuneError: the profile is not of these engines, there is no llama-server, or it has no flag for a
            setting.
    """
    engine = profile.match.engine.name
    if not declared(engine).foreign:
        raise TuneError(f"a profile of {engine} has no binaries whose flags could spell it")
    if form not in FORMS:
        raise TuneError(f"--as {form!r}: give {', '.join(FORMS)}")
    install = Installation(binaries, engine)
    server = install.tool("llama-server")
    if server is None:
        raise TuneError(f"{install.folder} has no llama-server; give --bin a folder that has one")
    help_ = install.help_of("llama-server") or Help()
    served = bool(profile.evidence and (profile.evidence.workload.name or "").startswith("serve:"))
    own = parse_command(command, help_, install.bench_help, engine, served=served) if command else Command()
    chosen: dict[str, Value] = {}
    for name, entry in profile.settings.items():
        if isinstance(entry, profiles.SettingEntry):
            chosen[name] = rules_text(entry.value) if isinstance(entry.value, list) else entry.value
    by_op = own.policy or any(n.startswith("op_offload.") for n in chosen)
    ids = install.op_ids(model) if by_op else {}
    own.incumbent |= named_policy(own.policy, ids)
    fixed = held_with(profile)
    kept_values = _own_values(profile, own, fixed, tell)
    try:
        settings = {**own.base, **kept_values, **fixed, **chosen}
        if served and "sequences" in settings and "kv_unified" in (usual := own_defaults(help_, own.batch)):
            # With a number of slots on the command line, the server has another default.
            settings.setdefault("kv_unified", usual["kv_unified"])
        spelled = spell(settings, engine, help_, bench=False, batch=own.batch, op_ids=ids, cuda=own.cuda)
    except NoSpelling as error:
        raise TuneError(f"{server}: {error}") from error
    spelled.args += _as_measured(profile, own, help_)
    visible = _visible(profile, install)
    for name in sorted(visible.keys() & own.env.keys()):
        if own.env[name] != visible[name]:
            tell(f"{name}={own.env[name]} of the command line stays, but the tune measured {visible[name]!r}")
    hidden = [n for n, value in own.env.items() if value and names_secret(n)]
    if hidden:
        tell(f"{', '.join(sorted(hidden))}: written as {HIDDEN}; insert the value where the server runs")
    spelled.env = {**visible, **own.env, **dict.fromkeys(hidden, HIDDEN), **spelled.env}
    if own.model is not None and not same_model(own.model, model):
        tell(f"-m {own.model} of the command line is replaced by {model}, the tuned or given model")
    plain = _without_model(own.kept)
    kept = redact_words(plain)
    if kept != plain:
        tell(f"secrets of the command line are written as {HIDDEN}; insert them where the server runs")
    place = os.path.abspath(model)
    if form == "env":
        return _environment_file(["-m", place, *kept], spelled, help_.flags, tell)
    words = [os.path.abspath(server), "-m", place, *kept, *spelled.all_args()]
    if form == "compose":
        return deployment.compose(words, spelled.env, profile, [place], tell)
    if form == "helm-values":
        return deployment.helm_values(words, spelled.env, profile, {"model": place}, tell)
    if form == "models.ini":
        return deployment.models_ini(words, spelled.env, help_, place, tell)
    return _shell(words, spelled) if form == "llama-server" else unit(words, spelled.env, profile)


def _without_model(tokens: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for token in tokens:
        if skip:
            skip = False
        elif token in ("-m", "--model"):
            skip = True
        elif not token.startswith("--model="):
            kept.append(token)
    return kept


def _shell(words: Sequence[str], spelled: Spelled) -> str:
    unset = [w for n, v in sorted(spelled.env.items()) if v is None for w in ("-u", n)]
    pairs = [f"{n}={v}" for n, v in sorted(spelled.env.items()) if v is not None]
    return shlex.join([*(["env"] if unset or pairs else []), *unset, *pairs, *words]) + "\n"


def _quoted(text: str) -> str:
    """A word quoted for systemd, where `%` and `$` are special, too."""
    text = text.replace("%", "%%").replace("$", "$$")
    if text and all(c.isalnum() or c in "-_./=,:+%@" for c in text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    # A control character could end the line or stay invisible. systemd reads \xHH.
    return '"' + "".join(f"\\x{ord(c):02x}" if ord(c) < 32 or ord(c) == 127 else c for c in text) + '"'


def unit(words: Sequence[str], env: Mapping[str, str | None], profile: profiles.Profile) -> str:
    """A unit of systemd. At a stop only the server gets SIGTERM, because it lets running requests end and
    then ends its own processes.

    Args:
        words: the command line, with the absolute path of the program.
        env: variables; None for a variable that must be absent.
        profile: the profile, whose label describes the unit.
    """
    label = " ".join((profile.label or profile.match.engine.name).split())
    lines = ["[Unit]", f"Description={label.replace('%', '%%')}", "After=network.target", "", "[Service]"]
    for name, value in sorted(env.items()):
        pair = _quoted(f"{name}={value}").replace("$$", "$")
        lines.append(f"UnsetEnvironment={name}" if value is None else f"Environment={pair}")
    lines += [f"ExecStart={' '.join(_quoted(w) for w in words)}", "KillMode=mixed", "Restart=on-failure", ""]
    return "\n".join([*lines, "[Install]", "WantedBy=multi-user.target", ""])


def _environment_file(
    kept: Sequence[str], spelled: Spelled, flags: Mapping[str, Flag], tell: Callable[[str], None]
) -> str:
    """The profile as an environment file. The server must list a variable for each flag of the profile.

    Args:
        kept: words of the user's command line, with the model. A word without a variable becomes a comment.
        tell: called with a line about these comments.
    """
    lines, rest = _own_variables(kept, flags)
    args = spelled.all_args()
    while args:
        name = args.pop(0)
        flag = flags[name]
        if not flag.env:
            raise TuneError(
                f"{name} has no environment variable in this llama-server; use --as llama-server or systemd"
            )
        lines[flag.env] = args.pop(0) if flag.argument else _switched(name, flag)
    unset = [n for n, v in sorted(spelled.env.items()) if v is None]
    lines |= {n: v for n, v in sorted(spelled.env.items()) if v is not None}
    text = [f"# unset this variable: {n}" for n in unset]
    if rest:
        words = shlex.join(rest)
        # A line break in a word would end the comment.
        text.append(
            f"# these words have no environment variable, so give them to the server: {escaped(words)}"
        )
        tell(f"{words} have no environment variable: give these words to the server as well")
    return "\n".join([*text, *(f"{n}={shlex.quote(v)}" for n, v in lines.items()), ""])


def _own_variables(kept: Sequence[str], flags: Mapping[str, Flag]) -> tuple[dict[str, str], list[str]]:
    """The variables for the user's words, and the words whose variable is missing or taken."""
    lines: dict[str, str] = {}
    rest: list[str] = []
    words = list(kept)
    while words:
        given = [words.pop(0)]
        name, equals, value = given[0].partition("=")
        flag = flags.get(name)
        if flag is not None and flag.argument and not equals and words:
            value = words.pop(0)
            given.append(value)
        if flag is None or not flag.env or flag.env in lines:
            rest += given
        else:
            lines[flag.env] = value if flag.argument else _switched(name, flag)
    return lines, rest


def _switched(name: str, flag: Flag) -> str:
    """The value of the variable of a switch. A switch and its opposite share one variable."""
    off = {n for n in flag.names if n in _OFF or n.startswith(("--no-", "-no"))}
    return "0" if name in off and off != set(flag.names) else "1"
