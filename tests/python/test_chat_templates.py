"""Chat templates: what they render, what they may not do, and where they are found."""

from __future__ import annotations

import datetime
import gc
import json
import os
import re
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dyno.chat import ChatTemplate, find_template, template_names
from dyno.chat._rendering import Limits, Renderer
from dyno.chat.template import BUILT_IN
from dyno.errors import ChatError
from vocabularies import control_vocabulary
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).resolve().parents[1] / "data" / "chat"
NOW = datetime.datetime(2026, 11, 24, 12)
USER = [{"role": "user", "content": "Hello"}]
OUR_OWN = [
    pytest.param(data["template"], case, id=f"{path.stem}-{i}")
    for path in sorted(DATA.glob("*.json"))
    for data in [json.loads(path.read_text(encoding="utf-8"))]
    for i, case in enumerate(data["cases"])
]


# ---- what they render ----


@pytest.mark.parametrize(("template", "case"), OUR_OWN)
def test_our_own_templates(template: str, case: dict[str, Any]) -> None:
    found = ChatTemplate(template, tokens={"bos_token": "<|begin|>"})
    arguments = {k: v for k, v in case.items() if k in ("tools", "add_generation_prompt")}
    if "error" in case:
        with pytest.raises(ChatError, match=f"given refuses these messages: {case['error']}"):
            found.render(case["messages"], now=NOW, **arguments)
    else:
        assert found.render(case["messages"], now=NOW, **arguments).text == case["rendered"]


def public_templates(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Templates of public models with what the public reference renders; not part of this project."""
    named = os.environ.get("DYNO_CHAT_TEMPLATES")
    models: Path | None = request.config.getoption("--models")
    folder = Path(named) if named else models.parent / "templates" if models else None
    if folder is None or not folder.is_dir():
        pytest.skip("needs DYNO_CHAT_TEMPLATES, or --models DIR with templates beside it")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    assert len(found) >= 20
    return found


def test_public_templates_take_messages_of_the_public_api(request: pytest.FixtureRequest) -> None:
    """Arguments as JSON text and content in parts come out as objects and text do in the reference."""
    wrong, called, parts = [], 0, 0
    for data in public_templates(request):
        special = {name: data[name] or "" for name in ("bos_token", "eos_token", "unk_token")}
        template = ChatTemplate(data["template"], data["family"], special)
        for case in data["cases"]:
            more = {**case["kwargs"], "add_generation_prompt": case["add_generation_prompt"]}
            now = datetime.datetime.fromisoformat(data["now"])
            objects = with_arguments(case["messages"], lambda given: json.loads(given or "{}"))
            listed = any(isinstance(message.get("content"), list) for message in objects)
            expected = case.get("rendered")
            if objects != case["messages"] or (listed and not_parts(expected)):
                plain = [
                    {**message, "content": "\n".join(part["text"] for part in message["content"])}
                    if isinstance(message.get("content"), list)
                    else message
                    for message in objects
                ]
                try:
                    expected = template.render(plain, tools=case["tools"], now=now, **more).text
                except ChatError:
                    expected = None
            if expected is None:
                continue
            texts = with_arguments(objects, json.dumps)
            called, parts = called + (texts != objects), parts + listed
            found = template.prompt(texts, case["tools"], more, now).text
            if found != expected:
                wrong.append(f"{data['family']}: {case['name']}")
    assert not wrong
    assert called > 150
    assert parts > 20


def with_arguments(messages: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Messages whose tool calls have other arguments, where the change is one."""
    found: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            if isinstance(function["arguments"], str) != (change is json.dumps):
                function["arguments"] = change(function["arguments"])
    return found


def not_parts(rendered: str | None) -> bool:
    """Whether a template does not take parts: it fails, drops them or writes them as they are."""
    return (
        rendered is None or "part one" not in rendered or re.search("['\"]type['\"]: ", rendered) is not None
    )


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "ü"}'}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{% for k, v in arguments | items %}{{ k }}={{ v }};{% endfor %}", "a=1;b=ü;"),
        ("{% for k, v in arguments.items() %}{{ k }}={{ v }};{% endfor %}", "a=1;b=ü;"),
        ("{{ arguments | tojson }}", '{"a": 1, "b": "ü"}'),
        ("{{ arguments if arguments is string else arguments | tojson }}", '{"a": 1, "b": "ü"}'),
        ("{{ '<' + arguments + '>' }}", '<{"a": 1, "b": "ü"}>'),
        ("<{{ arguments }}>", '<{"a": 1, "b": "ü"}>'),
    ],
)
@pytest.mark.parametrize("given", [str, json.loads])
def test_arguments_have_the_form_that_the_template_takes(
    arguments: str, expected: str, given: Callable[[str], Any]
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{% set arguments = c.function.arguments %}"
        + arguments
        + "{% endfor %}{% endfor %}"
    )
    function = {**CALL["function"], "arguments": given(CALL["function"]["arguments"])}
    messages = [*USER, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]
    assert template.prompt(messages).text == expected


@pytest.mark.parametrize("wrong", ['{"a": ', "[1]", "5", '{"a": "\\ud800"}'])
def test_arguments_that_are_not_an_object_stay_text(wrong: str) -> None:
    template = ChatTemplate(
        "{% for c in messages[-1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    function = {"name": "f", "arguments": wrong}
    messages = [*USER, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]
    assert template.prompt(messages).text == json.dumps(wrong)
    messages[-1]["tool_calls"][0]["function"]["arguments"] = " "
    assert template.prompt(messages).text == "{}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content }}", "<one\ntwo>"),
        ("{{ '' + m.content }}", "<one\ntwo>"),
        ("{{ m.content | tojson }}", '<"one\\ntwo">'),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "<one\ntwo>"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}",
            "<[one][two]>",
        ),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_parts_are_one_text_unless_the_template_takes_parts(content: str, expected: str, role: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    template = ChatTemplate(f"{{% for m in messages %}}<{content}>{{% endfor %}}")
    assert template.prompt([{"role": role, "content": parts}]).text == expected


def test_no_text_of_a_message_is_lost() -> None:
    """A template that reads the first part alone gets one text, and so does one for an empty list."""
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content[0].text }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in ("RULE1", "RULE2")]
    for role in ("system", "user", "assistant"):
        assert template.prompt([{"role": role, "content": parts}, *USER]).text == "RULE1\nRULE2Hello"
        assert template.prompt([{"role": role, "content": []}, *USER]).text == "Hello"


def test_a_template_may_take_parts_of_one_role() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% else %}{{ '' + m.content }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    messages = [{"role": role, "content": parts} for role in ("user", "assistant")]
    assert template.prompt(messages).text == "onetwoone\ntwo"


THINKING = "{{ messages[-1].content }}<assistant>{% if think %}<think>\n{% endif %}{# </think> #}"
HARMONY = "{# <|channel|>final<|message|> #}{{ messages[-1].content }}<|start|>assistant"


def test_an_answer_begins_as_content() -> None:
    """It stands behind the thoughts of a model that the template lets think, and behind a header."""
    parts = [{"type": "text", "text": text} for text in ("The", "answer")]
    for template, variables, opening in (
        (THINKING, {"think": True}, "<assistant><think>\n\n</think>\n\n"),
        (THINKING, {}, "<assistant>"),
        (HARMONY, {}, "<|start|>assistant<|channel|>final<|message|>"),
    ):
        for content in ("The\nanswer", parts):
            begun = [*USER, {"role": "assistant", "content": content}]
            found = ChatTemplate(template).prompt(begun, None, variables, continues=True)
            assert found.text == f"Hello{opening}The\nanswer"
            assert found.begun
            written = "".join(found.text[begin:end] for begin, end in found.own)
            assert written == opening
            empty = ChatTemplate(template).prompt(
                [*USER, {"role": "assistant", "content": ""}], None, variables, continues=True
            )
            assert empty == ChatTemplate(template).prompt(USER, None, variables)


def test_only_a_model_with_headers_gets_one_for_a_call() -> None:
    called = ChatTemplate(HARMONY).prompt(USER, calls=True)
    assert called.text == "Hello<|start|>assistant<|channel|>final<|message|>"
    assert called.begun
    variables = {"think": True}
    assert ChatTemplate(THINKING).prompt(USER, None, variables, calls=True).text.endswith("<think>\n")


@pytest.mark.parametrize(
    "content", [None, [{"type": "image_url"}], ["a"], [{"type": "text"}], [{"type": "text", "text": 1}]]
)
def test_only_texts_can_be_continued(content: Any) -> None:
    with pytest.raises(ChatError, match="can be continued"):
        ChatTemplate(THINKING).prompt([*USER, {"role": "assistant", "content": content}], continues=True)


@pytest.mark.parametrize("name", ["tools", "messages"])
def test_variables_are_no_way_to_replace_the_conversation(name: str) -> None:
    with pytest.raises(ChatError, match=f"gives the template's variable {name} its value"):
        ChatTemplate("{{ messages }}").prompt(USER, None, {name: []})


@pytest.mark.parametrize("name", ["self", "now", "strftime_now", "documents", "name", "text"])
def test_variables_may_have_any_other_name(name: str) -> None:
    value: Any = [{"text": "a"}] if name == "documents" else "b"
    template = ChatTemplate(
        "{{ now }}{{ name }}{{ text }}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    )
    expected = {"documents": "a", "self": "", "strftime_now": ""}.get(name, "b")
    assert template.prompt(USER, None, {name: value}).text == expected


@pytest.mark.parametrize("documents", [5, "a", {}, ["a"]])
def test_documents_are_a_list_of_objects(documents: Any) -> None:
    with pytest.raises(ChatError, match=r"documents is .*; expected a list of objects"):
        ChatTemplate("a").prompt(USER, None, {"documents": documents})


def test_public_templates_render_as_the_reference_does(request: pytest.FixtureRequest) -> None:
    wrong, lost, rendered = [], set(), 0
    names = re.compile(r"<\|[^|<>]*\|>|<｜[^｜]*｜>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_turn>|<bos>")
    for data in public_templates(request):
        special = {name: data[name] or "" for name in ("bos_token", "eos_token", "unk_token")}
        template = ChatTemplate(data["template"], data["family"], special)
        for case in data["cases"]:
            where = f"{data['family']}: {case['name']}"
            try:
                found = template.render(
                    case["messages"],
                    tools=case["tools"],
                    add_generation_prompt=case["add_generation_prompt"],
                    now=datetime.datetime.fromisoformat(data["now"]),
                    **case["kwargs"],
                )
            except ChatError as error:
                # A reference that fails by an error of Python is no example; a refusal is one.
                refused = "refuses these messages" in str(error)
                if "rendered" in case or (case["error_kind"] == "raise_exception") != refused:
                    wrong.append(f"{where}: {error}")
                continue
            if case.get("rendered") != found.text:
                wrong.append(where)
            rendered += 1
            for name in names.finditer(found.text):  # no message of these cases holds one
                if not any(a <= name.start() and name.end() <= b for a, b in found.own):
                    lost.add(f"{where}: {name[0]}")
    assert wrong == []
    assert lost == set()
    assert rendered > 500


def test_content_of_none_is_left_out_and_reasoning_has_both_names() -> None:
    template = ChatTemplate(
        "{{ 'content' in messages[0] }} {{ messages[0].thinking }} {{ messages[0].reasoning_content }}"
    )
    for name in ("thinking", "reasoning_content"):
        assert template.render([{"role": "user", "content": None, name: "why"}]).text == "False why why"


def test_variables_and_tools_are_defined() -> None:
    template = ChatTemplate("{{ tools is none }} {{ documents is none }} {{ enable_thinking }}")
    assert template.render(USER, enable_thinking=False).text == "True True False"


def test_messages_must_be_json() -> None:
    with pytest.raises(ChatError, match=r"plain JSON values: .*set"):
        ChatTemplate("x").render([{"role": "user", "content": {1}}])


def test_a_template_that_is_none_or_fails() -> None:
    with pytest.raises(ChatError, match=r"given is not valid Jinja2.*line 2: "):
        ChatTemplate("\n{% for %}").render(USER)
    with pytest.raises(ChatError, match=r"given fails on these messages: UndefinedError: .*no attribute 'x'"):
        ChatTemplate("{{ messages[0].x.y }}").render(USER)
    with pytest.raises(ChatError, match=r"fails on these messages: .*append"):
        ChatTemplate("{{ messages.append(1) }}").render(USER)


# ---- hostile ones ----


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('x' | attr('__class__')).mro() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_no_template_leaves_the_sandbox(text: str) -> None:
    try:
        shown = ChatTemplate(text).render(USER).text
    except ChatError as error:
        shown = re.sub(".*(unsafe|no loader).*", "", str(error))
    assert shown == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "within 1 s"),
        (
            "{% macro m(n) %}{{ m(n+1) if n < 60 }}{{ m(n+1) if n < 60 }}{% endmacro %}{{ m(0) }}",
            "within 1 s",
        ),
        ("{{ 9 ** (9 ** 9) }}", "within 1 s"),
        ("{{ 'x' * 10 ** 10 }}", "memory|MemoryError|within 1 s"),
        ("{{ messages[0].content * 10 ** 10 }}", "memory|MemoryError|within 1 s"),
        ("{{ 'x' | center(10 ** 10) }}", "memory|MemoryError|within 1 s"),
        ("{{ '%10000000000d' % 1 }}", "memory|MemoryError|within 1 s"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "memory|MemoryError|within 1 s",
        ),
        ("{{ [[0] * 10 ** 10] | length }}", "memory|MemoryError|within 1 s"),
        ("{{ range(10 ** 7) | list }}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' * 3000 }}", "3000 characters of at most 2000"),
    ],
)
def test_limits(text: str, message: str) -> None:
    # Where it is not about time, a busy machine has enough.
    limits = Limits(seconds=1 if "within" in message else 120, memory_bytes=1 << 30, max_chars=2000)
    with pytest.raises(ChatError, match=f"given .*({message})"):
        ChatTemplate(text, limits=limits).render(USER)
    limits = replace(limits, seconds=120)
    assert ChatTemplate("{{ messages[0].content }}", limits=limits).render(USER).text == "Hello"


def test_the_process_has_no_secret_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    renderer = Renderer(Limits(seconds=120))
    request = {"template": "x", "messages": [], "variables": {}, "tokens": {}, "now": None, "fits": False}
    assert renderer.render(request, "t")["text"] == "x"
    process = renderer._process
    assert process is not None
    assert b"hunter2" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    del renderer
    gc.collect()
    assert process.returncode is not None


def test_a_rendering_that_is_there_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy programs keep the thread that waits for it from looking until its time is over."""
    renderer = Renderer(Limits(seconds=60))
    request = {"template": "x", "messages": [], "variables": {}, "tokens": {}, "now": None, "fits": False}
    assert renderer.render(request, "t")["text"] == "x"
    process, write, clock, passed = renderer._process, os.write, time.monotonic, [0.0]
    assert process is not None

    def late(fd: int, data: Any) -> int:
        written = write(fd, data)
        assert select.select([process.stdout], [], [], LONG)[0]
        passed[0] = 100.0
        return written

    with monkeypatch.context() as patched:
        patched.setattr("dyno.chat._rendering.os.write", late)
        patched.setattr("dyno.chat._rendering.time.monotonic", lambda: clock() + passed[0])
        assert renderer.render(request, "t")["text"] == "x"
    assert passed[0]
    renderer.close()


def test_a_process_that_was_killed_is_started_again() -> None:
    renderer = Renderer(Limits(seconds=120))
    request = {"template": "x", "messages": [], "variables": {}, "tokens": {}, "now": None, "fits": False}
    assert renderer.render(request, "t")["text"] == "x"
    assert renderer._process is not None
    renderer._process.kill()
    renderer._process.wait()
    with pytest.raises(ChatError, match="t ended the process that rendered it"):
        renderer.render(request, "t")
    assert renderer.render(request, "t")["text"] == "x"
    renderer.close()


def test_an_interrupt_of_the_start_leaves_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(Limits(seconds=120))
    request = {"template": "x", "messages": [], "variables": {}, "tokens": {}, "now": None, "fits": False}
    with monkeypatch.context() as patched:

        def interrupted(*_: object) -> bytes:
            raise KeyboardInterrupt

        patched.setattr(Renderer, "_exchange", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            renderer.render(request, "t")
    assert renderer.render(request, "t")["text"] == "x"
    renderer.close()


def test_a_forked_child_renders_in_a_process_of_its_own() -> None:
    code = (
        "import os\nfrom dyno.chat import ChatTemplate\n"
        "t = ChatTemplate('{{ messages[0].content }}')\n"
        "m = lambda s: t.render([{'role': 'user', 'content': s}]).text\n"
        "assert m('a') == 'a'\n"
        "pid = os.fork()\n"
        "assert m('bc') == 'bc'\n"
        "if pid == 0: os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "assert m('def') == 'def'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# ---- where they are found ----


def test_a_file_without_one_says_what_to_pass() -> None:
    message = "no chat template; pass --chat-template FILE .* or --chat-template NAME with one of: chatml"
    with pytest.raises(ChatError, match=message):
        find_template({})


def test_named_variants() -> None:
    metadata = {
        "tokenizer.chat_template": "main",
        "tokenizer.chat_templates": ["tool_use", "rag", "gone"],
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_template.rag": "with documents",
    }
    assert template_names(metadata) == ["default", "tool_use", "rag"]
    assert find_template(metadata).text == "main"
    assert find_template(metadata, tools=True).text == "with tools"
    assert find_template(metadata, wanted="default", tools=True).text == "main"
    assert find_template(metadata, wanted="rag").text == "with documents"
    assert find_template(metadata, wanted="chatml").text == BUILT_IN["chatml"]
    with pytest.raises(ChatError, match=r"'gone' is neither a file nor .*: default, tool_use, rag, chatml"):
        find_template(metadata, wanted="gone")


def test_a_file_with_a_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}", encoding="utf-8")
    found = find_template({}, control_vocabulary().vocabulary, path)
    assert found.render(USER).text == "<|start|><|im_end|>"


def test_the_built_in_template() -> None:
    assert find_template({}, wanted="chatml").render(USER).text == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_interrupt_of_the_terminal_does_not_end_the_process_that_renders() -> None:
    """It reaches all processes of the terminal, also one that has just started and does not ignore it yet."""
    script = """
import os, signal
from dyno.chat import ChatTemplate
from dyno.chat._rendering import Renderer

signal.signal(signal.SIGINT, lambda *_: None)
exchange = Renderer._exchange

def interrupted(process, request, seconds):
    if not request:
        os.killpg(0, signal.SIGINT)
    return exchange(process, request, seconds)

Renderer._exchange = staticmethod(interrupted)
print(ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "Hello"}]).text)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, env=environment, timeout=600, check=False, start_new_session=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "Hello\n"), done.stderr
