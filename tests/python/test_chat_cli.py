"""`dyno run --chat` and `dyno chat`, in this process, through pipes and through a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import dyno
import pytest
from chat_model import chat_model
from dyno._cli.chat import history_file
from dyno._cli.conversation import Conversation
from dyno._writing import Drawn
from dyno.chat import Reply
from dyno.cli import app
from dyno.errors import PlanError
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PLAIN = ("--device", "cpu", "--no-profile", "-t", "1")
FOREVER = (
    "--logit-bias",
    "256-inf",
    "--logit-bias",
    "260-inf",
    "--temp",
    "0",
)  # no token that ends an answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "m.gguf", n_ctx=65536)


def run(*words: object, stdin: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(map(str, words)), input=stdin)
    error = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
    return done.exit_code, done.stdout, done.stderr + error


# ---- dyno run --chat ----


def test_run_answers_a_message(model: Path, tmp_path: Path) -> None:
    with dyno.Engine(model, device="cpu", profile=None, threads=1) as engine:
        messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
        want = engine.chat(messages, max_tokens=12).message()["content"]
    file = tmp_path / "prompt.txt"
    file.write_text("Hello", encoding="utf-8")
    for given, stdin in ((("-p", "Hello"), None), (("-f", str(file)), None), (("-p", "-"), "Hello")):
        code, out, err = run(
            "run", model, "--chat", "-sys", "Be brief", "-n", 12, *given, *PLAIN, stdin=stdin
        )
        assert (code, out) == (0, want + "\n"), err
        assert "not applied" not in err


def test_run_without_chat_names_it(model: Path) -> None:
    code, out, err = run("run", model, "-p", "Hello", "-n", 1, *PLAIN)
    assert code == 0
    assert out.startswith("Hello")
    assert "not applied; the prompt is continued as raw text (use --chat to apply it)" in err
    for name, flag in (("--chat-template", "--chat-template"), ("-sys/--system", "-sys")):
        code, _, err = run("run", model, "-p", "Hello", flag, "chatml", *PLAIN)
        assert (code, f"{name}: works only with --chat" in " ".join(err.split())) == (2, True)


def test_run_takes_every_setting_of_a_draw(model: Path) -> None:
    settings = {
        "typical-p": "0.9",
        "xtc-probability": "0.5",
        "xtc-threshold": "0.05",
        "repeat-penalty": "1.1",
        "repeat-last-n": "32",
        "presence-penalty": "0.2",
        "frequency-penalty": "0.3",
        "dry-multiplier": "0.8",
        "dry-base": "1.5",
        "dry-allowed-length": "3",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    code, out, err = run(
        "run", model, "-p", "x", "--temp", 1, "-s", 3, "-n", 20, "-l", "65+2", *words, *PLAIN
    )
    assert code == 0, err
    with dyno.Engine(model, device="cpu", profile=None, threads=1) as engine:
        options: Any = {n.replace("-", "_"): float(v) if "." in v else int(v) for n, v in settings.items()}
        pieces = engine.generate("x", 20, 1.0, seed=3, logit_bias={65: 2.0}, **options)
        assert out == "x" + "".join(pieces) + "\n"


def test_run_prints_calls(model: Path, tmp_path: Path, says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"type": "function", "function": {"name": "now"}}]', encoding="utf-8")
    call = '<tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
    for text, lines in ((f"<think>why</think>Wait.{call}{call}", ["Wait."]), (call + call, [])):
        says(text + "<|end|>")
        code, out, err = run("run", model, "--chat", "--tools", file, "-p", "x", *PLAIN)
        assert (code, "why" in err) == (0, bool(lines)), err
        written = out.splitlines()
        assert written[:-2] == lines
        for line in written[-2:]:
            assert json.loads(line)["function"] == {"name": "now", "arguments": '{"zone": "é"}'}
    for wrong in ("{", "{}", "[1]"):
        file.write_text(wrong, encoding="utf-8")
        code, _, err = run("run", model, "--chat", "--tools", file, "-p", "x", *PLAIN)
        assert (code, bool(re.search(r"is not (a )?JSON", " ".join(err.replace("│", " ").split())))) == (
            2,
            True,
        )


def test_run_follows_rules(model: Path, tmp_path: Path) -> None:
    schema, grammar = '{"enum": ["yes", "no"]}', 'root ::= "yes" | "no"'
    (tmp_path / "schema.json").write_text(schema, encoding="utf-8")
    (tmp_path / "rules.gbnf").write_text(grammar, encoding="utf-8")
    for chat in ((), ("--chat",)):
        for words in (
            ("-j", schema),
            ("-jf", tmp_path / "schema.json"),
            ("--grammar", grammar),
            ("--grammar-file", tmp_path / "rules.gbnf"),
        ):
            code, out, err = run("run", model, "-p", "x", "--no-echo", *chat, *words, *PLAIN)
            assert code == 0, err
            assert out.strip().strip('"') in ("yes", "no")
    code, _, err = run("run", model, "-p", "x", "-j", schema, "--grammar", grammar, *PLAIN)
    assert (code, "contradicts --grammar" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-l", "15043"), "'15043' is not TOKEN+VALUE"),
        (("--chat", "--chat-template-kwargs", "{"), "'{' is not JSON"),
        (("--chat", "--chat-template-kwargs", "[]"), "'[]' is not a JSON object"),
    ],
)
def test_words_that_can_not_be_read(model: Path, words: tuple[str, ...], message: str) -> None:
    code, _, err = run("run", model, "-p", "x", *words, *PLAIN)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_a_variable_of_the_template_does_not_replace_the_tools(model: Path) -> None:
    words = ("--chat", "-p", "x", "-n", 1, "--chat-template-kwargs", '{"tools": []}')
    code, _, err = run("run", model, *words, *PLAIN)
    assert code == 1
    assert "[chat] the conversation gives the template's variable tools its value" in err


def test_a_file_without_a_template_says_what_to_pass(tmp_path: Path) -> None:
    bare = chat_model(tmp_path / "bare.gguf", template=None)
    for command in (("run", bare, "--chat", "-p", "x"), ("chat", bare)):
        code, _, err = run(*command, *PLAIN, stdin="x\n")
        assert code == 1
        assert "no chat template; pass --chat-template FILE" in err
    assert run("run", bare, "--chat", "--chat-template", "chatml", "-p", "x", "-n", 1, *PLAIN)[0] == 0


# ---- dyno chat, in this process ----


@pytest.fixture
def engine(model: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(model, device="cpu", profile=None, ctx=256, threads=1) as opened:
        yield opened


@pytest.fixture
def says(engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def script(text: str, interrupt: bool = False) -> None:
        tokens = engine.tokenize(text, parse_special=True)

        def drawn(*rest: Any, **more: Any) -> Any:
            yield from map(Drawn, tokens)
            if interrupt:
                raise KeyboardInterrupt

        monkeypatch.setattr("dyno._completion.drawn_tokens", drawn)

    return script


def conversation(engine: dyno.Engine, **options: Any) -> tuple[Conversation, io.StringIO]:
    out = io.StringIO()
    return Conversation(engine, engine.chat_template(), out=out, **options), out


def test_a_conversation_remembers(engine: dyno.Engine, says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk, out = conversation(engine, system="Be brief")
    says("<think>why</think>Yes.\x1b]0;title\x07<|end|>")
    assert talk.say("Is it?")
    assert out.getvalue() == "why\n\nYes.\\x1b]0;title\\x07\n"
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert talk.messages[1]["reasoning_content"] == "why"
    assert re.search(
        r"\[prompt \d+ tokens, [\d.]+ s · answer \d+ tokens, [\d.]+ t/s\]", capsys.readouterr().err
    )
    says("cut", interrupt=True)
    talk.say("And now?")
    assert talk.messages[-1]["content"] == "cut"
    assert ", stopped]" in capsys.readouterr().err
    talk.say("/reset")
    assert talk.messages == []


def test_two_slashes_send_a_message_that_begins_with_one(
    engine: dyno.Engine, says: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, _ = conversation(engine)
    for line, message in (
        ("//reset", "/reset"),
        ("///", "//"),
        ("//", "/"),
        (" /reset", " /reset"),
        ("//a\n//b", "/a\n//b"),
    ):
        says("x")
        assert talk.say(line)
        assert talk.messages[-2] == {"role": "user", "content": message}
    assert len(talk.messages) == 10
    capsys.readouterr()
    talk.say("/usr/bin")
    assert "write two: //usr/bin" in capsys.readouterr().err
    talk.say("/help")
    assert "//TEXT " in capsys.readouterr().err
    assert len(talk.messages) == 10


def test_what_was_said_is_not_read_again(engine: dyno.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = conversation(engine, max_tokens=8, options={"temperature": 0.0})
    talk.say("Hello")
    first = engine.position(0)
    assert "held" not in capsys.readouterr().err
    talk.say("More")
    held = re.search(r"\((\d+) held\)", capsys.readouterr().err)
    assert held
    assert 0 < int(held[1]) <= first


def test_commands(engine: dyno.Engine, says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk, out = conversation(engine)
    says("x")

    def told(line: str) -> str:
        assert talk.say(line)
        return capsys.readouterr().err

    assert "/reset" in told("/help")
    assert told("/set temperature 0.25") == "temperature 0.25\n"
    assert told("/set max_tokens 5") == "max_tokens 5\n"
    assert told("/set top_k 7") == "top_k 7\n"
    assert told("/set ubatch 32") == "ubatch 32\n"
    assert engine.settings["ubatch"] == 32
    shown = told("/set")
    assert "temperature 0.25" in shown
    assert "dry_multiplier 0.0" in shown
    assert "temperature must be at least 0, not -1.0" in told("/set temperature -1")
    assert "temperature 0.25" in told("/set")
    assert told("/set temperature warm") == "error: temperature must be a number, not 'warm'\n"
    assert told("/set top_k 3.5") == "error: top_k must be a whole number, not '3.5'\n"
    assert told("/set seed x") == "error: seed must be a whole number, not 'x'\n"
    assert "error: " in told("/set max_tokens 0")
    assert told("/set max_tokens -1") == "max_tokens to the end of the context\n"
    assert told("/set seed none") == "seed none\n"
    for line, outcome in (("temperature", "0.25"), ("temperature=0.5", "0.5"), ("temperature = 0.75", "")):
        assert told(f"/set {line}").split("temperature ")[-1].startswith(outcome), line
    assert told("/set ubatch") == "ubatch 32\n"
    assert told("/set ctx 64") == (
        "error: ctx is fixed while the model is open; start again with --set ctx=64\n"
    )
    assert "seed none\n" in told("/set")
    for rule in ("json_schema 5", "json_schema none", 'grammar root ::= "a"', "regex a"):
        assert f"no setting {rule.split()[0]}; known: " in told(f"/set {rule}")
    assert not {"json_schema", "grammar", "regex"} & {line.split()[0] for line in told("/set").splitlines()}
    assert "no setting temprature" in told("/set temprature 1")
    assert "/walk is not a command" in told("/walk")
    assert told("  ") == ""
    assert not out.getvalue()
    assert "answer 1 tokens" in told("Hello")
    assert told("/system Be kind") == "the conversation is empty\n"
    assert talk.messages == []
    assert not talk.say("/exit")


def test_a_message_that_cannot_be_read_is_not_sent(
    engine: dyno.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, out = conversation(engine)
    assert talk.say(b"Z\xfcrich".decode("utf-8", "surrogateescape"))
    told = capsys.readouterr().err
    assert told.startswith("error: the byte 0xFC of the message is not UTF-8; send the message as UTF-8")
    assert talk.messages == []
    assert not out.getvalue()


def test_a_second_interrupt_leaves_no_wrong_beginning(
    engine: dyno.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come while the first one ends the answer, when the sequence holds other tokens than before."""
    talk, out = conversation(engine, max_tokens=4, options={"temperature": 0.0})
    talk.say("Hello")
    with monkeypatch.context() as patched:
        closed = Reply.close

        def interrupted(reply: Reply) -> None:
            closed(reply)
            raise KeyboardInterrupt

        patched.setattr(Reply, "close", interrupted)
        talk.say("/reset")
        talk.say("Another message")
    out.truncate(0)
    talk.say("/reset")
    talk.say("Hello")
    other, alone = conversation(engine, max_tokens=4, options={"temperature": 0.0})
    engine.reset()
    other.say("Hello")
    assert out.getvalue().strip("\0") == alone.getvalue()


def test_a_refused_message_is_forgotten(engine: dyno.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = conversation(engine)
    talk.say("x" * 300)
    assert "error: [chat] the conversation has " in capsys.readouterr().err
    assert talk.messages == []
    with pytest.raises(PlanError, match="temperature"):
        conversation(engine, options={"temperature": -1.0})


# ---- dyno chat, as a program ----


def test_lines_of_a_pipe_are_messages(model: Path) -> None:
    code, out, err = run("chat", model, *PLAIN, *FOREVER, "-n", 5, stdin="Hello\n/set top_k 3\nMore\n")
    assert code == 0, err
    assert err.count("[prompt ") == 2
    assert "top_k 3" in err
    assert out.count("\n") >= 2


def test_a_wrong_byte_in_a_pipe_ends_nothing(model: Path) -> None:
    """Where a wrong byte is an error of Python's: in a locale of UTF-8 other than C."""
    command = [sys.executable, "-m", "dyno", "chat", str(model), *PLAIN, *FOREVER, "-n", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONIOENCODING": "utf-8:strict",
    }
    done = subprocess.run(
        command, input=b"Z\xfcrich\nMore\n", capture_output=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"the byte 0xFC of the message is not UTF-8" in done.stderr
    assert done.stderr.count(b"[prompt ") == 1


def test_a_closed_input_is_named(model: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "dyno", "chat", str(model), *PLAIN]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "error: standard input is closed; start dyno chat in a terminal, or pipe messages into it\n"
    )


READY = r"\x1b\[\?2004h[^>]*>"  # a prompt takes pasted text from here on
SENT = r"\x1b\[\?2004l"


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, words: list[object], environment: dict[str, str]) -> None:
        self._main, terminal = pty.openpty()
        # The first process of a session owns the terminal that it opens, so that Ctrl-C reaches it.
        script = 'exec "$@" <"$0" >"$0" 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", script, os.ttyname(terminal), sys.executable, "-m", "dyno", *map(str, words)],
            start_new_session=True,
            env={**os.environ, **environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        self._terminal = terminal  # kept open: without it, reading fails before the program has opened it
        self.seen = ""

    def until(self, pattern: str) -> str:
        """Everything written until `pattern` was, which is then forgotten."""
        deadline = time.monotonic() + 300
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern} in {self.seen[-2000:]!r}"
            if select.select([self._main], [], [], 1)[0]:
                self.seen += os.read(self._main, 4096).decode(errors="replace")
            else:
                assert self.process.poll() is None, f"ended without {pattern}: {self.seen[-2000:]!r}"
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def end(self) -> int:
        return self.process.wait(timeout=600)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._terminal)


def test_a_conversation_at_a_terminal(model: Path, tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "XDG_STATE_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    words: list[object] = ["chat", model, "--device", "cpu", "-t", "1", "-c", 60000, *FOREVER]
    terminal = Terminal(words, environment)
    try:
        terminal.until("profile")  # which one runs
        terminal.until(READY)
        terminal.type("/set max_tokens 4\r")
        terminal.until(READY)
        terminal.type("one\x1b\rtwo\r")  # Alt-Enter between
        terminal.until(r"answer 4 tokens, [\d.]+ t/s, cut off")
        terminal.until(READY)
        terminal.type("/set max_tokens -1\r")
        terminal.until("max_tokens to the end of the context")
        terminal.until(READY)
        terminal.type("tell me more\r")
        terminal.until(SENT)
        terminal.until("(?s).{300}")  # it answers
        terminal.type("\x03")
        terminal.until(r"stopped\]")
        terminal.until(READY)
        terminal.type("half a line\x03")  # forgotten
        terminal.until(READY)
        terminal.type("/help\r")
        terminal.until("/reset")
        terminal.until(READY)
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()
    history = tmp_path / "dyno" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    text = history.read_text(encoding="utf-8")
    assert "+one\n+two\n" in text
    assert "half a line" not in text


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "dyno" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local" / "state" / "dyno" / "chat_history"


def test_without_prompt_toolkit_the_error_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dyno._cli import chat

    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(ImportError, match=r"pip install 'gguf-dyno\[chat\]'"):
        chat._typed(False)
    assert run("chat", model, *PLAIN, *FOREVER, "-n", 1, stdin="x\n")[0] == 0  # a pipe needs none
