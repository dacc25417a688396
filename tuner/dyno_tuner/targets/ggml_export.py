"""A profile of llama.cpp or ik_llama.cpp as the command line, the environment or the systemd unit that runs
it, spelled for the binary that will.

The user's own command line, if the profile was tuned from one, stays as it is but for the settings that the
profile changes.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from dyno import profiles
from dyno.settings import SETTINGS

from ..errors import TuneError
from .ggml_command import Command, parse_command
from .ggml_help import Help
from .ggml_install import Installation
from .ggml_spell import Spelled, rules_text, spell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..target import Value

_OFF = ("-nr", "-nkvo")
FORMS = ("llama-server", "env", "systemd")


def tuned_with(profile: profiles.Profile) -> tuple[str | None, str | None, list[str]]:
    """Folder of the binaries, model and the user's own command line, from the command that made a profile."""
    try:
        words = shlex.split(profile.provenance.command or "") if profile.provenance else []
    except ValueError:
        words = []  # not written by this tuner
    cut = words.index("--") if "--" in words else len(words)
    found: dict[str, str] = {}
    for n, word in enumerate(words[:cut]):
        name, equals, value = word.partition("=")
        if name in ("--bin", "--model", "-m"):
            found["--bin" if name == "--bin" else "--model"] = (
                value if equals else "".join(words[n + 1 : n + 2])
            )
    return found.get("--bin"), found.get("--model"), words[cut + 1 :]


def held_with(profile: profiles.Profile) -> dict[str, Value]:
    """Settings that a profile was tuned with by `--set`: everything was measured with them. Raises TuneError
    for a value that is none."""
    try:
        words = shlex.split(profile.provenance.command or "") if profile.provenance else []
    except ValueError:
        words = []  # not written by this tuner
    cut = words.index("--") if "--" in words else len(words)
    held: dict[str, Value] = {}
    for n, word in enumerate(words[:cut]):
        pair = "".join(words[n + 1 : n + 2]) if word == "--set" else word.removeprefix("--set=")
        if word != "--set" and not word.startswith("--set="):
            continue
        name, equals, text = pair.partition("=")
        if equals and name in SETTINGS:
            try:
                value = SETTINGS[name].parse(text)
            except ValueError as error:
                raise TuneError(f"the command that made the profile: --set {pair}: {error}") from error
            held[name] = rules_text(value) if isinstance(value, list) else value
    return held


def export(
    profile: profiles.Profile, form: str, *, binaries: str, model: str, command: Sequence[str] = ()
) -> str:
    """Text for a shell, an `EnvironmentFile` or a unit.

    Args:
        form: one of `FORMS`.
        binaries: folder that has the engine's llama-server; its `--help` decides the spelling.
        model: path that the server is to load.
        command: the user's own command line; what the profile sets replaces what it says.

    Raises:
        TuneError: not a profile of these engines, no llama-server, or a setting that it can't be told.
    """
    engine = profile.match.engine.name
    if engine == "dyno":
        raise TuneError("this is a profile of dyno itself, which takes it with --profile; nothing to export")
    if form not in FORMS:
        raise TuneError(f"--as {form!r}: give {', '.join(FORMS)}")
    install = Installation(binaries, engine)
    server = install.tool("llama-server")
    if server is None:
        raise TuneError(f"{install.folder} has no llama-server; give --bin a folder that has one")
    help_ = install.help_of("llama-server") or Help()
    own = parse_command(command, help_, install.bench_help, engine) if command else Command()
    chosen: dict[str, Value] = {}
    for name, entry in profile.settings.items():
        if isinstance(entry, profiles.SettingEntry):
            chosen[name] = rules_text(entry.value) if isinstance(entry.value, list) else entry.value
    ids = install.op_ids(model) if any(n.startswith("op_offload.") for n in chosen) else {}
    # What was looked at and left at its default is left out: the user's value did not prove better.
    held = {n: v for n, v in own.incumbent.items() if n not in profile.settings}
    try:
        settings = {**own.base, **held, **held_with(profile), **chosen}
        spelled = spell(settings, engine, help_, bench=False, batch=own.batch, op_ids=ids)
    except ValueError as error:
        raise TuneError(f"{server}: {error}") from error
    spelled.env = {**own.env, **spelled.env}
    if form == "env":
        return _environment_file(spelled, profile, help_.flags)
    kept = _without_model(own.kept)
    words = [os.path.abspath(server), "-m", os.path.abspath(model), *kept, *spelled.all_args()]
    return _shell(words, spelled) if form == "llama-server" else _unit(words, spelled, profile)


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
    """For systemd, where `%` and `$` are special, too."""
    text = text.replace("%", "%%").replace("$", "$$")
    if text and all(c.isalnum() or c in "-_./=,:+%@" for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _unit(words: Sequence[str], spelled: Spelled, profile: profiles.Profile) -> str:
    label = " ".join((profile.label or profile.match.engine.name).split())
    lines = ["[Unit]", f"Description={label.replace('%', '%%')}", "After=network.target", "", "[Service]"]
    for name, value in sorted(spelled.env.items()):
        pair = _quoted(f"{name}={value}").replace("$$", "$")
        lines.append(f"UnsetEnvironment={name}" if value is None else f"Environment={pair}")
    lines += [f"ExecStart={' '.join(_quoted(w) for w in words)}", "Restart=on-failure", ""]
    return "\n".join([*lines, "[Install]", "WantedBy=multi-user.target", ""])


def _environment_file(spelled: Spelled, profile: profiles.Profile, flags: Mapping[str, object]) -> str:
    """Only where this server lists a variable for every flag."""
    lines: dict[str, str] = {}
    args = spelled.all_args()
    while args:
        name = args.pop(0)
        flag = flags[name]
        variable = getattr(flag, "env", "")
        if not variable:
            raise TuneError(
                f"{name} has no environment variable in this llama-server; use --as llama-server or systemd"
            )
        if getattr(flag, "argument", ""):
            lines[variable] = args.pop(0)
        else:  # one variable for a flag and its opposite
            lines[variable] = "0" if name in _OFF or name.startswith("--no-") else "1"
    unset = [n for n, v in sorted(spelled.env.items()) if v is None]
    lines |= {n: v for n, v in sorted(spelled.env.items()) if v is not None}
    text = [f"# has to be unset: {n}" for n in unset]
    return "\n".join([*text, *(f"{n}={shlex.quote(v)}" for n, v in lines.items()), ""])
