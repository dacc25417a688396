"""A conversation at a terminal: messages, sampling settings, and the commands that change them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from dyno._sampling import DrawOptions, Sampling
from dyno._shell import escaped
from dyno._writing import reusable
from dyno.chat.reply import Reply
from dyno.errors import DynoError, PlanError
from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dyno.chat import ChatTemplate, Part
    from dyno.engine import Engine

__all__ = ["HELP", "Conversation"]

HELP = """\
/help               this list
/reset              forget the conversation, and keep the system message
/system TEXT        set the system message, or remove it if TEXT is missing, and forget the rest
/set                show the settings
/set NAME VALUE     change one, such as /set temperature 0.5 or /set max_tokens 200
/exit               end (also Ctrl-D)
//TEXT              send /TEXT as a message
Enter sends, Alt-Enter begins a new line, the arrow keys bring back what was sent.
Ctrl-C ends an answer and keeps its text."""

_UNSET = {"max_tokens": "to the end of the context", "seed": "none"}
"""Settings that can be unset, and the words that unset them."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Conversation:
    """A conversation: the messages so far and the sampling settings of the next answer.

    Args:
        engine: Engine that answers; the conversation owns its slot 0.
        template: The chat template.
        system: The system message, if there is one.
        variables: Variables of the template.
        max_tokens: Maximum length of an answer in tokens; None: until the context is full.
        stop: Strings that end an answer.
        options: Sampling settings.
        out: Stream for the answers.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        *,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
        options: Mapping[str, Any] | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._engine, self._template = engine, template
        self._variables, self._stop = dict(variables or {}), list(stop or [])
        self._settings: dict[str, Any] = {"max_tokens": max_tokens, **(options or {})}
        self._sampling()  # refuse impossible settings now, not at the first answer
        self._out = out or sys.stdout
        self._dim = self._out.isatty()
        self._held: list[int] = []
        self._system = system
        self.messages: list[dict[str, Any]] = []
        """The conversation, without the system message."""

    def say(self, text: str) -> bool:
        """Answer a line of the user, or carry out its command.

        Returns:
            Whether the conversation goes on.
        """
        if not text.strip():
            return True
        wrong = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        if wrong is not None:  # Python's sign for a byte that it could not read
            self._tell(
                f"error: the byte 0x{ord(wrong) & 0xFF:02X} of the message is not {_encoding()}; send the "
                "message as UTF-8, and set LANG=C.UTF-8 if the terminal expects another encoding"
            )
            return True
        if not text.startswith("/") or text.startswith("//"):
            self._answer(text[1:] if text.startswith("/") else text)
            return True
        name, _, rest = text.strip().partition(" ")
        commands = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._change_system,
            "/set": self._set,
        }
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name in commands:
            commands[name](rest.strip())
        else:
            self._tell(
                f"{escaped(name)} is not a command; /help lists the commands. To send a message that begins "
                f"with a slash, write two: /{escaped(name)}"
            )
        return True

    # ---- commands ----

    def _help(self, rest: str) -> None:
        self._tell(HELP)

    def _reset(self, rest: str) -> None:
        self.messages.clear()
        self._tell("the conversation is empty")

    def _change_system(self, text: str) -> None:
        self._system = text or None
        self._reset("")

    def _set(self, rest: str) -> None:
        name, value = _name_and_value(rest)
        values = {**_defaults(), **self._settings}
        try:
            if not name:
                for key in sorted(values):
                    self._tell_setting(key)
            elif name not in values and name not in SETTINGS:
                self._tell(f"no setting {escaped(name)}; known: {', '.join(sorted(values))}")
            elif not value:
                self._tell_setting(name)
            elif name in values:
                self._change(name, value)
            elif SETTINGS[name].kind == "session":
                self._engine.set(**{name: SETTINGS[name].parse(value)})
                self._tell_setting(name)
            else:
                self._tell(
                    f"error: {name} is fixed while the model is open; start again with "
                    f"--set {name}={escaped(value)}"
                )
        except (DynoError, ValueError) as error:
            self._tell(f"error: {escaped(str(error))}")

    def _tell_setting(self, name: str) -> None:
        values = {**self._engine.settings, **_defaults(), **self._settings}
        self._tell(f"{name} {_UNSET.get(name, 'none') if values[name] is None else values[name]}")

    def _change(self, name: str, value: str) -> None:
        default = _defaults()[name]
        before = dict(self._settings)
        if value.lower() in ("none", "-1") and name in _UNSET:
            self._settings[name] = None
        else:
            whole = name in _UNSET or isinstance(default, int)
            try:
                self._settings[name] = int(value) if whole else float(value)
            except ValueError:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{name} must be {kind}, not {value!r:.80}") from None
        try:
            self._sampling()
        except DynoError:
            self._settings = before
            raise
        self._tell_setting(name)

    # ---- answers ----

    def _sampling(self) -> Sampling:
        most = self._settings["max_tokens"]
        if most is not None and most < 1:
            raise PlanError(f"[chat] max_tokens must be at least 1, not {most}")
        return Sampling(**{k: v for k, v in self._settings.items() if k != "max_tokens"})

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            reply = Reply(
                self._engine,
                [*system, *self.messages],
                self._template,
                None,
                self._variables,
                self._sampling(),
                self._settings["max_tokens"],
                self._stop,
                0,
                self._held,
            )
            self._write(reply)
        except DynoError as error:
            self.messages.pop()
            self._tell(f"error: {escaped(str(error))}; /reset begins a new conversation")
        except KeyboardInterrupt:  # before the answer began
            self.messages.pop()
            self._tell("[stopped]")

    def _write(self, reply: Reply) -> None:
        engine = self._engine
        kept = reusable(engine, reply.prompt, self._held, 0)
        self._held = []  # until it is known: a second Ctrl-C may come at any point of the end
        start = first = time.perf_counter()
        ended = ""
        reasoning = False
        try:
            for part in reply:
                if first == start:
                    first = time.perf_counter()
                reasoning = self._show(part, reasoning)
        except KeyboardInterrupt:
            ended = ", stopped"
        finally:
            reply.close()
            if reasoning and self._dim:
                self._out.write(_PLAIN)
            self._out.write("\n")
            self._out.flush()
            self._held = [*reply.prompt, *reply.tokens][: engine.position(0)]
        self.messages.append(reply.answer.message())
        if reply.finish_reason == "length":
            ended = ", cut off"
        seconds, drawn = time.perf_counter() - first, len(reply.tokens) - 1
        speed = f", {drawn / seconds:.1f} t/s" if drawn > 0 and seconds > 0 else ""
        held = f" ({kept} held)" if kept else ""
        self._tell(
            f"[prompt {len(reply.prompt)} tokens{held}, {first - start:.2f} s · "
            f"answer {len(reply.tokens)} tokens{speed}{ended}]"
        )

    def _show(self, part: Part, reasoning: bool) -> bool:
        """Write a part of an answer, reasoning in dim text. Returns whether it was reasoning."""
        if bool(part.reasoning) != reasoning:
            mark = _DIM if part.reasoning else _PLAIN
            self._out.write(mark if self._dim else "")
            self._out.write("" if part.reasoning else "\n\n")
        self._out.write(_printable(part.reasoning or part.content))
        self._out.flush()
        return bool(part.reasoning)

    def _tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _name_and_value(rest: str) -> tuple[str, str]:
    """Of `NAME VALUE` or `NAME=VALUE`."""
    name, joint, value = rest.partition(" ")
    if "=" in name:
        name, _, begin = name.partition("=")
        value = begin + joint + value
    return name, value.strip()


def _encoding() -> str:
    """Of the messages that are typed or piped."""
    return str(getattr(sys.stdin, "encoding", None) or "UTF-8").upper()


def _defaults() -> dict[str, Any]:
    """The settings of `/set` and their defaults."""
    neutral = Sampling()
    named = ("temperature", "top_k", "top_p", "min_p", "seed", *DrawOptions.__annotations__)
    plain = {name: getattr(neutral, name) for name in named}
    return {
        **dict.fromkeys(_UNSET),
        **{name: value for name, value in plain.items() if isinstance(value, (int, float))},
    }


def _printable(text: str) -> str:
    """`text` without control codes, so that an answer cannot move the cursor or set the title."""
    return "".join(c if c in "\n\t" or c.isprintable() else escaped(c) for c in text)
