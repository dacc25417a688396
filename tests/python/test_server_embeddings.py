"""`/v1/embeddings`: the public API's format, its client, limits and errors."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chat_model import chat_model
from dyno.server import Options
from served import GREEDY, HELLO, KEY, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

TEXTS = ["a", "def main(argv):", "x" * 90, "one two three"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Served]:
    model, options = (
        chat_model(tmp_path_factory.mktemp("model") / "m.gguf"),
        Options(model="tiny", api_key=KEY),
    )
    with serving(model, options, ctx=128, device=device, numerics="exact") as server:
        yield server


def ask(served: Served, **fields: Any) -> httpx.Response:
    return served.client.post("/v1/embeddings", json=fields)


def test_vectors_are_those_of_the_engine(served: Served) -> None:
    wanted = served.engine.embed(TEXTS)
    body = ask(served, input=TEXTS, model="any").json()
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", i) for i in range(4)]
    assert np.allclose([each["embedding"] for each in body["data"]], wanted, atol=1e-6)
    tokens = sum(len(served.engine.tokenize(text)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    packed = ask(served, input=TEXTS, encoding_format="base64").json()["data"]
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed]
    assert np.allclose(found, wanted, atol=1e-6)
    one = served.engine.tokenize(TEXTS[1])
    for same in (TEXTS[1], [TEXTS[1]], one, [one]):
        vector = ask(served, input=same).json()["data"][0]["embedding"]
        assert np.allclose(vector, wanted[1], atol=1e-6)
    years = ask(served, input=["2024", "2025"]).json()["data"]  # texts, not one text of two tokens
    assert np.allclose(
        [each["embedding"] for each in years], served.engine.embed(["2024", "2025"]), atol=1e-6
    )
    last = ask(served, input=TEXTS[1], pooling="last", normalize=False).json()["data"][0]["embedding"]
    assert np.allclose(last, served.engine.embed(TEXTS[1], "last", normalize=False)[0], atol=1e-5)


def test_the_public_client_reads_both_formats(served: Served) -> None:
    openai = pytest.importorskip("openai")
    wanted = served.engine.embed(TEXTS)
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0) as client:
        for more in ({}, {"encoding_format": "float"}):  # without it, the client asks for base64
            answer = client.embeddings.create(model="any", input=TEXTS, **more)
            assert np.allclose([each.embedding for each in answer.data], wanted, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="cannot be cut to 8"):
            client.embeddings.create(model="any", input="a", dimensions=8)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, None, "input is empty"),
        ({"input": ""}, None, "input is empty"),
        ({"input": ["a", "x" * 200]}, "input.1", "input.1: the prompt has 200 tokens, ctx is 128"),
        ({"input": [[1, 99999]]}, None, "token 99999 is not one of"),
        ({"input": ["a"] * 2049}, None, "holds 2049 texts; expected at most 2048"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "max"}, "pooling", "'mean', 'last' or 'cls'"),
    ],
)
def test_impossible_requests(served: Served, fields: dict[str, Any], param: str | None, text: str) -> None:
    answer = ask(served, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param or param is None
    assert re.search(text, error["message"]), error


def test_a_deadline_ends_the_work_and_chats_go_on(served: Served) -> None:
    before = served.client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY}).json()
    late = ask(served, input=["x" * 120] * 2000, timeout=0.05)
    assert late.status_code == 504
    after = served.client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY}).json()
    assert after["choices"][0]["message"] == before["choices"][0]["message"]
    assert (
        served.client.post("/v1/embeddings", json={"input": "a"}, headers={"Authorization": ""}).status_code
        == 401
    )
