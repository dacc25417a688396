"""Metrics: vLLM's names, the profile in force and its promise beside what was measured."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from chat_model import chat_model
from dyno import Sampling
from dyno._requests import Handling, Step
from dyno.server import Options
from dyno.server.metrics import Promise
from served import GREEDY, KEY, Served, serving
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEL = '{model_name="tiny"}'
MOE = Path(__file__).resolve().parents[1] / "data" / "tiny" / "qwen3moe-tiny.gguf"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = chat_model(tmp_path_factory.mktemp("model") / "m.gguf")
    with serving(model, Options(model="tiny", api_key=KEY)) as server:
        yield server


def test_requests_are_counted_with_the_names_of_vllm(served: Served) -> None:
    before = served.metrics()
    content = "a text that no other test has sent"
    body = {"messages": [{"role": "user", "content": content}], **GREEDY}
    used = [served.client.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
    assert served.client.post("/v1/chat/completions", json={**body, "temperature": -1}).status_code == 400
    after = served.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    drawn, prompts = (sum(u[f"{kind}_tokens"] for u in used) for kind in ("completion", "prompt"))
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in used)
    assert cached > 0
    assert grown(f"vllm:generation_tokens_total{LABEL}") == drawn
    assert grown(f"vllm:prompt_tokens_total{LABEL}") == prompts
    assert grown(f"vllm:prefix_cache_queries_total{LABEL}") == prompts
    assert grown(f"vllm:prefix_cache_hits_total{LABEL}") == cached
    assert grown(f"vllm:time_to_first_token_seconds_count{LABEL}") == 2
    assert grown(f"vllm:request_queue_time_seconds_count{LABEL}") == 2
    assert grown(f"vllm:e2e_request_latency_seconds_count{LABEL}") == 2
    assert grown(f"vllm:inter_token_latency_seconds_count{LABEL}") == drawn - 2
    assert grown(f"vllm:request_prompt_tokens_sum{LABEL}") == prompts
    assert grown(f"vllm:request_generation_tokens_sum{LABEL}") == drawn
    assert grown(f"vllm:iteration_tokens_total_sum{LABEL}") == prompts - cached + drawn - 2
    ends = {
        r: f'vllm:request_success_total{{finished_reason="{r}",model_name="tiny"}}'
        for r in ("stop", "length")
    }
    assert sum(grown(name) for name in ends.values() if name in after) == 2
    for status, count in ((200, 2), (400, 1)):
        assert grown(f'dyno_requests_total{{path="/v1/chat/completions",status="{status}"}}') == count
    assert after[f"dyno_sequences{LABEL}"] == 2
    assert after['dyno_profile_info{hash="",match="default",state="off"}'] == 1


def test_an_expert_cache_is_counted(served: Served) -> None:
    assert f"dyno_expert_choices_total{LABEL}" not in served.metrics()
    with serving(
        MOE, Options(model="tiny", api_key=KEY), device="cpu:1", numerics="default", virtual_devices=1,
        cpu_moe=True, expert_cache_mib=1, expert_cache="adaptive",
    ) as server:  # fmt: skip
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 4}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        after = server.metrics()
        choices = server.engine.expert_choices
    assert choices["chosen"] > 0
    for name, key in (("choices", "chosen"), ("cache_hits", "cached"), ("cache_swaps", "swapped")):
        assert after[f"dyno_expert_{name}_total{LABEL}"] == choices[key]


@contextmanager
def held_elsewhere(lock: threading.RLock) -> Iterator[None]:
    """A lock that another thread holds meanwhile: the scheduler refuses calls of a thread that has it."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(120)
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_running_and_waiting_texts_are_gauges(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = served.scheduler
    idle = served.metrics()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert idle[f"vllm:{name}{LABEL}"] == 0
    batch, under_way, go = scheduler._batch, threading.Event(), threading.Event()

    def held() -> list[object]:
        made = batch()
        if len(made) == 2 and all(request.drawn for request, _ in made):
            under_way.set()
            assert go.wait(120)  # two texts are under way, and stay so while the metrics are read
        return made

    monkeypatch.setattr(scheduler, "_batch", held)
    with held_elsewhere(served.engine._lock):  # none begins before all have come
        requests = [
            scheduler._submit([1, 2, 3], Sampling(), 9, threading.Event(), Handling()) for _ in range(3)
        ]
    assert under_way.wait(120)
    assert scheduler.load()["held_tokens"] >= 6
    busy = served.metrics()
    assert busy[f"vllm:num_requests_running{LABEL}"] == 2
    assert busy[f"vllm:num_requests_waiting{LABEL}"] == 1
    assert busy[f"vllm:kv_cache_usage_perc{LABEL}"] == pytest.approx(scheduler.load()["held_tokens"] / 512)
    go.set()
    for request in requests:
        while request.out.get(timeout=120) is not None:
            pass
    until(lambda: scheduler.load()["running"] == 0)


def test_the_memory_of_the_cache_is_a_gauge(served: Served) -> None:
    name, most = f"dyno_kv_cache_bytes{LABEL}", f"dyno_kv_cache_max_bytes{LABEL}"
    short = {"prompt": [1, 2, 3], "max_tokens": 2, "cache_prompt": False}
    long = {"prompt": [4, *range(1, 90), *range(1, 90)], "max_tokens": 2, "cache_prompt": False}
    held = []
    for body in (short, long):
        assert served.client.post("/v1/completions", json=body).status_code == 200
        until(lambda: served.scheduler.load()["running"] == 0)
        held.append(served.metrics()[name])
    assert 0 < held[0] < held[1] <= served.metrics()[most] == served.engine.plan["kv_bytes"]
    assert held[1] == served.engine._open().cache_memory
    props = served.client.get("/props").json()
    assert (props["cache_bytes"], props["cache_bytes_most"]) == (held[1], served.metrics()[most])


def test_the_promise_of_a_profile_is_compared_with_like_work() -> None:
    tuned = {"pp512": 1000.0, "pp64": 10.0, "tg64": 50.0, "tg64@d4096": 1.0, "memory_mib": 9.0}
    profile = SimpleNamespace(evidence=SimpleNamespace(tuned=tuned))
    engine = SimpleNamespace(match=SimpleNamespace(profile=profile))
    promise = Promise(engine)  # type: ignore[arg-type]
    assert promise.promised == {"pp": 1000.0, "tg": 50.0}
    assert promise.ratios() == {}
    alone = {"sequences": 1, "tokens": 1, "prompt_tokens": 0, "deepest": 100, "seconds": 0.025}
    for change in (
        {},
        {},
        {"seconds": 10.0},  # a median does not follow one slow step
        {"sequences": 2, "tokens": 2, "seconds": 1.0},
        {"deepest": 5000, "seconds": 1.0},
        *3 * ({"tokens": 9, "seconds": 0.01},),  # a draft of 8 that was checked
    ):
        promise.stepped(Step(**{**alone, **change}))  # type: ignore[arg-type]
    prompt = {"sequences": 1, "tokens": 256, "prompt_tokens": 256, "deepest": 256, "seconds": 0.512}
    deep = {"deepest": 30000, "seconds": 5.0}  # attention over so many tokens takes long
    for change in ({}, {"tokens": 20, "prompt_tokens": 20}, {"sequences": 3}, deep, deep):
        promise.stepped(Step(**{**prompt, **change}))  # type: ignore[arg-type]
    assert promise.ratios() == pytest.approx({"pp": 0.5, "tg": 0.8})
