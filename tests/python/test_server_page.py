"""The server's page: its files, and its script run by Node, after a failure, a stop and a reset."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from chat_model import chat_model
from dyno.server import Options
from served import KEY, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

HARNESS = Path(__file__).with_name("page_run.js")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[httpx.Client]:
    model = chat_model(tmp_path_factory.mktemp("model") / "m.gguf")
    with serving(model, Options(api_key=KEY), device=device) as server:
        yield server.client


def test_the_page(client: httpx.Client) -> None:
    page = httpx.get(f"{client.base_url}/")  # without a key
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    files = re.findall(r'(?:href|src)="([^"]+\.\w+)"', page.text)
    assert sorted(files) == ["page.css", "page.js"]
    for name in files:
        assert httpx.get(f"{client.base_url}/{name}").status_code == 200
    script = httpx.get(f"{client.base_url}/page.js").text
    named = set(re.findall(r'at\("(\w+)"\)', script))
    assert named <= set(re.findall(r'id="(\w+)"', page.text))
    for path in re.findall(r'fetch\("([^"]+)"', script):
        assert client.get(f"/{path}").status_code in (200, 405)
    assert "innerHTML" not in script


def ran(*steps: dict[str, Any]) -> dict[str, Any]:
    """The page's requests (the messages of each), the number of its errors, and the text in its box."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    with resources.as_file(resources.files("dyno.server.page") / "page.js") as script:
        command = [node, str(HARNESS), str(script), json.dumps(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def say(text: str, **reply: Any) -> dict[str, Any]:
    return {"say": text, "reply": reply or {"texts": ["Yes."]}}


def asked(*texts: str) -> list[dict[str, str]]:
    """Turns of user and assistant, one after the other."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_conversation_goes_on() -> None:
    found = ran(say("a", texts=["B", "b"]), say("c"))
    assert found == {"requests": [asked("a"), asked("a", "Bb", "c")], "errors": 0, "box": ""}


@pytest.mark.parametrize("failure", [{"status": 429}, {"texts": ["Hal"], "error": "the engine failed"}])
def test_a_question_without_an_answer_is_taken_back(failure: dict[str, Any]) -> None:
    found = ran(say("a"), say("b", **failure))
    assert found == {"requests": [asked("a"), asked("a", "Yes.", "b")], "errors": 1, "box": "b"}
    found = ran(say("a"), say("b", **failure), say("c"))
    assert found["requests"][-1] == asked("a", "Yes.", "c")


def test_a_stopped_answer_stays_if_it_has_text() -> None:
    stopped = (say("a", texts=["Hal"], ends=False), {"stop": True}, say("b"))
    assert ran(*stopped)["requests"] == [asked("a"), asked("a", "Hal", "b")]
    silent = (say("a", ends=False), {"stop": True})
    assert ran(*silent)["box"] == "a"
    assert ran(*silent, say("b"))["requests"] == [asked("a"), asked("b")]


@pytest.mark.parametrize("texts", [[], ["Hal"]])
def test_nothing_of_a_stopped_answer_comes_after_a_reset(texts: list[str]) -> None:
    found = ran(say("a", texts=texts, ends=False), {"reset": True}, say("b"), say("c"))
    assert found["requests"] == [asked("a"), asked("b"), asked("b", "Yes.", "c")]
    assert ran(say("a", texts=texts, ends=False), {"reset": True})["box"] == ""
