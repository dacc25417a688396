"""The OpenAPI document of a server, and answers to requests that schemathesis makes from it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from chat_model import chat_model
from dyno import Engine
from dyno.server import Options, create_app, page
from dyno.server.endpoints import Endpoints
from dyno.server.openapi import OPERATIONS, document, document_bytes
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi import checks
from served import HELLO, KEY, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.requests import Request

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}


def closed() -> dict[str, Any]:
    """The document of a server with a key, whose answers have no other fields than it says."""
    described = copy.deepcopy(document(needs_key=True))
    for schema in described["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return described


api = schemathesis.openapi.from_dict(closed(), config=schemathesis.Config())
# Wrong bodies of this phase are thousands; the phase after it makes some, too.
api.config.phases.coverage.generation.modes = [schemathesis.GenerationMode.POSITIVE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    # A text ends soon, because its context is short.
    with serving(model, Options(model="tiny", api_key=KEY), ctx=64, threads=1) as server:
        yield server


def ask(case: schemathesis.Case, served: Served, key: str = KEY) -> Any:
    return case.call(served.address, headers={"Authorization": f"Bearer {key}"}, timeout=600)


@settings(
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def answered_as_described(case: schemathesis.Case, served: Served) -> None:
    answer = ask(case, served)
    asked = isinstance(case.body, dict) and case.body.get("timeout") is not None
    assert answer.status_code < 500 or (asked and answer.status_code == 504), answer.text
    case.validate_response(answer, checks=CHECKS)


for each in OPERATIONS:
    # One test for each, because pytest gives all tests of one function the same identifier.
    alone = api.include(path=each.path, method=each.method)
    globals()[f"test_answers_to_{each.name}_are_the_described_ones"] = alone.parametrize()(
        answered_as_described
    )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"messages": HELLO, "n": 2}),
        ("POST", "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
        ("POST", "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "stream": True, "n": 2}),
        (
            "POST",
            "/v1/chat/completions",
            {
                "messages": HELLO,
                "tools": [{"type": "function", "function": TOOL}],
                "tool_choice": "required",
            },
        ),
        ("POST", "/v1/completions", {"prompt": ["a", "b"], "unknown": 1}),
        ("POST", "/v1/completions", {"prompt": [5], "logprobs": 2, "echo": True, "stop": "a"}),
        (
            "POST",
            "/v1/completions",
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "logprobs": 1},
        ),
        ("POST", "/v1/embeddings", {"input": "Hello"}),
        ("POST", "/v1/embeddings", {"input": [[1], [2]], "encoding_format": "base64"}),
        ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 2}),
        (
            "POST",
            "/v1/messages",
            {
                "messages": HELLO,
                "max_tokens": 50,
                "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
                "tool_choice": {"type": "any"},
            },
        ),
        ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 2, "stream": True}),
        ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
        ("POST", "/tokenize", {"content": "Hello"}),
        ("POST", "/tokenize", {"content": "é", "with_pieces": True}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/tokenizer_info", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/{name}", None),
        ("GET", "/props", None),
        ("GET", "/metrics", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/openapi.json", None),
    ],
)
def test_answers_to_good_requests_are_the_described_ones(
    served: Served, method: str, path: str, body: dict[str, Any] | None
) -> None:
    given: dict[str, Any] = {} if body is None else {"body": body, "media_type": "application/json"}
    names = {"name": "tiny"} if "{name}" in path else {}
    case = api[path][method].Case(path_parameters=names, **given)
    answer = ask(case, served)
    assert answer.status_code == 200, answer.text
    case.validate_response(answer, checks=CHECKS)
    refused = ask(case, served, key="wrong")
    assert refused.status_code == (200 if path in ("/health", "/ready") else 401)
    case.validate_response(refused, checks=CHECKS)


def test_a_refusal_of_a_wrong_body_is_the_described_one(served: Served) -> None:
    for each in OPERATIONS:
        if each.body is not None:
            case = api[each.path]["POST"].Case(body={}, media_type="application/json")
            answer = ask(case, served)
            assert answer.status_code == 400
            case.validate_response(answer, checks=CHECKS)


def test_the_described_body_of_a_path_is_the_one_that_it_checks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = {}, Endpoints._body

    async def recorded(self: Endpoints, request: Request, kind: type[Any]) -> Any:
        checked[request.url.path] = kind
        return await check(self, request, kind)

    monkeypatch.setattr(Endpoints, "_body", recorded)
    described = {each.path: each.body for each in OPERATIONS if each.body is not None}
    for path in described:
        served.client.post(path, json={})
    assert checked == described


def test_the_document_is_valid() -> None:
    for needs_key in (True, False):
        schemathesis.openapi.from_dict(document(needs_key=needs_key)).validate()
    names = document(needs_key=True)["components"]["schemas"]
    assert not [name for name in names if "__" in name or name.startswith("_")], "two models of one name"


def test_the_document_has_every_route(model: Path) -> None:
    with Engine(model, device="cpu", profile=None, ctx=64) as engine:
        app = create_app(engine)
        of_page = {route.path for route in page.routes()}
        routes = {
            (method, route.path.replace(":path}", "}"))
            for route in app.routes
            for method in route.methods - {"HEAD"}
            if route.path not in of_page
        }
        app.state.scheduler.close()
    described = {
        (method.upper(), path)
        for path, methods in document(needs_key=True)["paths"].items()
        for method in methods
    }
    assert described == routes


def test_a_server_gives_the_document_of_itself(served: Served, model: Path) -> None:
    answer = served.client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == document(needs_key=True)
    assert answer.json()["security"] == [{"bearer": []}, {"header": []}]
    with serving(model, Options(listens="127.0.0.1"), ctx=64) as server:
        given = httpx.get(server.address + "/openapi.json", timeout=120)
        assert given.json() == document(needs_key=False)
        assert "security" not in given.json()
        assert "401" not in given.text


def test_the_document_is_the_same_in_every_process() -> None:
    program = (
        "import sys; from dyno.server.openapi import document_bytes; "
        "sys.stdout.buffer.write(document_bytes(needs_key=True))"
    )
    command = [sys.executable, "-c", program]
    for seed in ("1", "2"):
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=600
        )
        assert done.stdout == document_bytes(needs_key=True)
