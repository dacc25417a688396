"""Layers with a sliding window keep their window: logits stay, memory shrinks, sequences go back less far."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError, ProfileError
from fresh_process import lacks_memory_figures, probed, spoilt_by_sanitizer
from random_models import SHAPES, Shape, random_model
from window_shapes import GPT_OSS, SLACK, WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

STRIDE = 1024
"""Between stops of a CPU's cache, with windows of up to 128 positions."""
WINDOWED = [
    replace(shape, metadata={**shape.metadata, "context_length": 16384})
    for shape in SHAPES
    if shape.architecture in {"gemma3", "gpt-oss", "gemma4", "olmo2", "muse-glimmer"}
]
WINDOWED_GPT_OSS = replace(GPT_OSS, metadata={**GPT_OSS.metadata, "context_length": 16384})
# argv: model, window_cache, lengths of texts. Prints the resident bytes that these take, one after the other.
PROBE = """
import sys
import numpy as np
from dyno import _core

def resident():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

context = {"ctx": 16384, "kv_type_k": "f32", "kv_type_v": "f32", "window_cache": sys.argv[2]}
s = _core.Session(sys.argv[1], context=context, session={"threads": 1, "ubatch": 256})
s.decode([(0, np.arange(64, dtype=np.int32))], "none")
before = resident()
for length in map(int, sys.argv[3:]):
    s.reset(0)
    s.decode([(0, np.arange(length, dtype=np.int32) % 90)], "none")
print(resident() - before)
"""
# Likewise, but a signal breaks the decode of the first text off, late.
BROKEN_PROBE = "import signal, time\n" + PROBE.replace(
    """before = resident()
for""",
    """
class BrokenOff(Exception):
    pass

def handler(*_):
    raise BrokenOff

signal.signal(signal.SIGALRM, handler)
before = resident()
text = np.arange(int(sys.argv.pop(3)), dtype=np.int32) % 90
began = time.perf_counter()
s.decode([(0, text)], "none")
wait = time.perf_counter() - began
while s.position(0) > 0:
    s.reset(0)
    wait *= 0.7  # sooner each time, since a busy machine may have become quiet
    try:
        signal.setitimer(signal.ITIMER_REAL, wait)
        s.decode([(0, text)], "none")
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BrokenOff:
        pass
for""",
)


def opened(path: Path, window_cache: str, device: str = "cpu", **context: Any) -> _core.Session:
    return _core.Session(
        path,
        load={"device": device, "numerics": "exact"},
        context={
            "ctx": 2048,
            "kv_type_k": "f32",
            "kv_type_v": "f32",
            "window_cache": window_cache,
            **context,
        },
        session={"threads": 2, "ubatch": 64},
    )


def tokens(seed: int, count: int, shape: Shape) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, shape.n_vocab, count).astype(np.int32)


def decode(s: _core.Session, slot: int, text: NDArray[np.int32]) -> NDArray[np.float32]:
    logits = s.decode([(slot, text)], "all")[0]
    assert logits is not None
    return logits


def common(a: list[int], b: list[int]) -> int:
    """The length of the common beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def after(path: Path, device: str, text: NDArray[np.int32], *cuts: int) -> NDArray[np.float32]:
    """Logits behind the last cut, with a full cache: u-batches begin at cuts, on which rounding depends."""
    s = opened(path, "full", device)
    return [decode(s, 0, part) for part in np.split(text, cuts)][-1]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "m.gguf", GPT_OSS)


@pytest.mark.parametrize("shape", WINDOWED, ids=lambda shape: shape.name)
def test_logits_are_those_of_the_full_cache(tmp_path: Path, shape: Shape, device: str) -> None:
    path = random_model(tmp_path / "m.gguf", shape)
    full, windowed = opened(path, "full", device), opened(path, "window", device)
    assert windowed.plan["cache_window"] == shape.window
    assert full.plan["cache_window"] == 0
    text = tokens(1, 1100, shape)
    for part in np.split(text, [1000, 1001, 1002, 1064]):  # a prompt, single tokens, and both again
        assert np.array_equal(decode(full, 0, part), decode(windowed, 0, part))
    assert windowed.cache_bytes < full.cache_bytes
    on_host = device == "cpu"
    assert [s.cache_memory for s in (full, windowed)] == [
        s.cache_bytes if on_host else s.gpu_cache_bytes for s in (full, windowed)
    ]


@pytest.mark.parametrize("shape", WINDOWED, ids=lambda shape: shape.name)
def test_the_default_goes_back_to_stops_with_the_same_bits(tmp_path: Path, shape: Shape) -> None:
    path = random_model(tmp_path / "m.gguf", shape)
    full, windowed = opened(path, "full", ctx=8192), opened(path, "auto", ctx=8192)
    assert windowed.plan["cache_window"] == shape.window
    assert windowed.plan["window_stride"] == STRIDE
    text, other = tokens(11, 2600, shape), tokens(12, 400, shape)
    for each in (full, windowed):
        for part in np.split(text, [2500]):
            each.decode([(0, part)], "none")
    places = {2500: 2500, 2300: 2 * STRIDE, 1500: STRIDE, 1023: 0}
    if shape.window == 1:  # a token sees itself alone, so nothing is lost
        places = {place: place for place in places}
    assert {place: windowed.rewindable(place) for place in places} == places
    for stop in (2 * STRIDE, STRIDE):
        for each in (full, windowed):
            each.rewind(stop)
        for part in np.split(other, [399]):
            assert np.array_equal(decode(full, 0, part), decode(windowed, 0, part))


def test_a_copy_takes_the_stops(gpt_oss: Path) -> None:
    path = random_model(gpt_oss.parent / "copied.gguf", WINDOWED_GPT_OSS)
    full, s = (opened(path, mode, ctx=8192, sequences=2) for mode in ("full", "window"))
    text, other = tokens(16, 3500, GPT_OSS), tokens(17, 700, GPT_OSS)
    for each in (full, s):
        each.decode([(0, text)], "none")
        each.decode([(1, other)], "none")  # which the copy takes the place of
        each.decode([(0, text[:1])], "none")
        each.copy_prefix(0, 1, 2 * STRIDE)
    assert s.cache_bytes < full.cache_bytes
    held = s.cache_bytes
    assert [s.rewindable(p, 1) for p in (2 * STRIDE, 1500, 1000)] == [2 * STRIDE, STRIDE, 0]
    s.reset(0)
    assert s.cache_bytes < held
    for each in (full, s):
        each.rewind(STRIDE, 1)
    assert np.array_equal(decode(full, 1, other), decode(s, 1, other))
    s.decode([(1, other)], "none")
    assert s.rewindable(STRIDE + len(other) - SLACK - 1, 1) == STRIDE


def test_many_stops_stay_until_their_text_goes(gpt_oss: Path) -> None:
    path = random_model(gpt_oss.parent / "long.gguf", WINDOWED_GPT_OSS)
    full, s = opened(path, "full", ctx=8192), opened(path, "window", ctx=8192)
    text = tokens(13, 7000, GPT_OSS)
    for each in (full, s):
        each.decode([(0, text)], "none")
        each.decode([(0, text[:1])], "none")
    stops = [STRIDE * k for k in range(1, 6)]
    assert [s.rewindable(stop + STRIDE - 1) for stop in stops] == stops
    assert s.cache_bytes < s.plan["kv_bytes"]
    s.rewind(stops[2])
    full.rewind(stops[2])
    part = tokens(14, 2000, GPT_OSS)
    assert np.array_equal(decode(full, 0, part), decode(s, 0, part))
    assert [s.rewindable(stop) for stop in stops] == [*stops[:4], 5072]  # its end
    s.decode([(0, part[:1])], "none")
    for each in (full, s):
        each.rewind(stops[3])
    assert np.array_equal(decode(full, 0, part[:300]), decode(s, 0, part[:300]))
    s.reset(0)
    assert s.rewindable(stops[0]) == 0


def test_the_default_is_chosen_anew_with_the_context(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", WINDOWED[0])
    s = opened(path, "auto")
    for ctx, mode in ((2048, "full"), (8192, "window"), (1024, "full")):
        s.set_context({"ctx": ctx})
        assert s.plan["settings"]["window_cache"] == mode
        s.decode([(0, tokens(15, 1000, WINDOWED[0]))], "none")
        assert s.rewindable(10) == (10 if mode == "full" else 0)


def test_a_window_longer_than_the_context_changes_nothing(tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", replace(GPT_OSS, window=4000))
    full, windowed = opened(path, "full"), opened(path, "window")
    assert windowed.plan["kv_bytes"] == full.plan["kv_bytes"]
    text = tokens(2, 2048, GPT_OSS)
    for s in (full, windowed):
        s.decode([(0, text)], "none")
    assert windowed.cache_bytes == full.cache_bytes
    assert windowed.rewindable(3) == 3


def test_sequences_go_back_to_places_whose_window_is_there(gpt_oss: Path, device: str) -> None:
    text = tokens(3, 1500, GPT_OSS)
    full, s = opened(gpt_oss, "full", device), opened(gpt_oss, "window", device)
    for part in np.split(text[:1400], [700]):
        assert np.array_equal(decode(s, 0, part), decode(full, 0, part))
    for each in (full, s):
        assert each.rewindable(700) == 700  # where the last decode began
        each.rewind(700)
    assert np.array_equal(decode(s, 0, text[700:1400]), decode(full, 0, text[700:1400]))
    for token in text[1400:1410]:
        assert np.array_equal(decode(s, 0, token.reshape(1)), decode(full, 0, token.reshape(1)))
    assert [s.rewindable(p) for p in (1410, 1410 - SLACK, 700, 5, 0)] == [1410, 1410 - SLACK, 0, 0, 0]
    with pytest.raises(
        PlanError,
        match=r"cannot rewind sequence 0 at position 700: .*window of 9 .*nearest earlier position is 0",
    ):
        s.rewind(700)
    assert s.position() == 1410
    s.rewind(1410 - SLACK)
    full.rewind(1410 - SLACK)
    assert np.array_equal(decode(s, 0, text[1410 - SLACK :]), decode(full, 0, text[1410 - SLACK :]))


def test_a_checkpoint_keeps_its_window(gpt_oss: Path, device: str) -> None:
    text, other = tokens(4, 1500, GPT_OSS), tokens(5, 900, GPT_OSS)
    s = opened(gpt_oss, "window", device)
    s.decode([(0, text[:600])], "none")
    there = s.checkpoint()
    for at in range(0, 900, 300):
        s.decode([(0, other[at : at + 300])], "none")
    assert [s.rewindable(p) for p in (1400, 601, 600, 600 - SLACK // 2)] == [1400, 600, 600, 600 - SLACK // 2]
    s.restore(there)
    assert np.array_equal(decode(s, 0, text[600:]), after(gpt_oss, device, text, 600))
    s.decode([(0, text[:300])], "none")
    assert s.rewindable(600) == 600
    held = s.cache_bytes
    del there
    s.decode([(0, other[:1])], "none")
    assert s.rewindable(600) == 0
    assert s.cache_bytes < held


def test_so_many_checkpoints_keep_their_window(gpt_oss: Path) -> None:
    s = opened(gpt_oss, "window")
    assert s.plan["window_checkpoints"] == 2
    held = []
    for at in range(4):
        s.decode([(0, tokens(at, 450, GPT_OSS))], "none")
        held.append(s.checkpoint())
    s.decode([(0, tokens(9, 100, GPT_OSS))], "none")
    s.decode([(0, tokens(9, 1, GPT_OSS))], "none")
    # The last one is near the end, where the sequence can go anyway.
    assert [s.rewindable(c.position) for c in held] == [0, 900, 1350, 1800]
    with pytest.raises(PlanError, match=r"position 450 cannot be restored: .*newer checkpoints have taken"):
        s.restore(held[0])
    s.restore(held[1])
    assert s.position() == 900


def test_spare_checkpoints_give_way(gpt_oss: Path) -> None:
    """A generation marks the end of its prompt: that takes no checkpoint of a caller's."""
    s = opened(gpt_oss, "window")
    held = []
    for at, spare in enumerate((False, False, True)):
        s.decode([(0, tokens(at, 450, GPT_OSS))], "none")
        held.append(s.checkpoint(0, spare))
    for count in (500, 1):
        s.decode([(0, tokens(9, count, GPT_OSS))], "none")
    # 1024 is one of the places where windows stay in any case.
    assert [s.rewindable(c.position) for c in held] == [450, 900, 1024]
    s.restore(held[0])
    del held[1:]
    s.decode([(0, tokens(3, 450, GPT_OSS))], "none")
    held.append(s.checkpoint(0, spare=True))
    for count in (500, 1):
        s.decode([(0, tokens(9, count, GPT_OSS))], "none")
    assert [s.rewindable(c.position) for c in held] == [450, 900]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_gives_the_logits_of_the_full_cache(gpt_oss: Path, device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    full, windowed = (opened(gpt_oss, mode, device, sequences=3) for mode in ("full", "window"))
    held: list[list[int]] = [[], [], []]
    computed: list[list[int]] = [[], [], []]  # by the full cache, which goes back to any place
    checkpoints: list[_core.Checkpoint] = []
    copies = rewinds = 0
    for _ in range(60):
        slot, other = (int(each) for each in rng.choice(3, 2, replace=False))
        action = rng.integers(0, 5)
        count = windowed.rewindable(int(rng.integers(0, len(held[slot]) + 1)), slot)
        if action == 0:
            windowed.copy_prefix(slot, other, count)
            held[other] = held[slot][:count]
            copies += count > 0
        elif action == 1:
            windowed.rewind(count, slot)
            held[slot] = held[slot][:count]
            rewinds += count > 0
        elif action == 2:
            checkpoints = [*checkpoints[-3:], windowed.checkpoint(slot)]
            windowed.trim(other)
        slots = [slot] if action < 3 else [slot, other]
        batch = []
        for each in slots:
            more = tokens(int(rng.integers(1 << 30)), int(rng.integers(1, 400)), GPT_OSS)
            if len(held[each]) + len(more) <= 2048:
                batch.append((each, more))
        if not batch:
            held[slot] = []
            windowed.reset(slot)
            continue
        found = windowed.decode(batch, "last")[0]
        missing = []
        for each, more in batch:
            held[each] += more.tolist()
            same = min(common(computed[each], held[each]), len(held[each]) - 1)
            full.rewind(same, each)
            missing.append((each, np.array(held[each][same:], np.int32)))
            computed[each] = list(held[each])
        wanted = full.decode(missing, "last")[0]
        assert found is not None
        assert wanted is not None
        assert np.allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert copies > 2
    assert rewinds > 2


class BrokenOff(Exception):
    """Of a signal that comes between two u-batches."""


@pytest.fixture
def broken_off() -> Iterator[None]:
    """A signal handler that raises BrokenOff."""

    def handler(*_: object) -> None:
        raise BrokenOff

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("broken_off")
def test_a_decode_that_is_broken_off_leaves_the_sequence(gpt_oss: Path) -> None:
    text = tokens(6, 1500, GPT_OSS)
    s = opened(gpt_oss, "window")
    s.decode([(0, text[:500])], "none")
    began = time.perf_counter()
    s.decode([(0, text[500:])], "none")
    took = time.perf_counter() - began
    for attempt in range(1, 9):  # the first decode may have been slow because the machine was busy
        s.reset(0)
        s.decode([(0, text[:500])], "none")
        with pytest.raises(BrokenOff):  # noqa: PT012 - the second call only waits for a signal that came too late
            signal.setitimer(signal.ITIMER_REAL, took / 2**attempt)
            s.decode([(0, text[500:])], "none")
            time.sleep(600)
        if s.position(0) == 500:
            break
    assert s.position(0) == 500
    assert np.array_equal(decode(s, 0, text[500:]), after(gpt_oss, "cpu", text, 500))


def resident(folder: Path, mode: str, *lengths: int, probe: str = PROBE) -> int:
    """Bytes that texts take, one after the other; two of four layers are windowed."""
    if reason := lacks_memory_figures() or spoilt_by_sanitizer():
        pytest.skip(reason)
    shape = replace(GPT_OSS, n_layers=4, metadata={**GPT_OSS.metadata, "context_length": 16384})
    path = random_model(folder / "m.gguf", shape)
    return int(probed(probe, path, mode, *lengths, timeout=600))


def test_resident_memory_is_that_of_the_windows(tmp_path: Path) -> None:
    found = {mode: resident(tmp_path, mode, 16000) for mode in ("full", "window")}
    layer = 16000 * 2 * GPT_OSS.kv_heads * GPT_OSS.head_dim * 4
    assert found["full"] > 3.8 * layer
    assert found["full"] - found["window"] > 1.7 * layer, (found, layer)  # two of four layers


def test_texts_that_become_shorter_leave_no_windows(tmp_path: Path) -> None:
    """No token passes by the end of a longer text, so its rows go when it is forgotten."""
    longest = resident(tmp_path, "window", 8000)
    layer = 8000 * 2 * GPT_OSS.kv_heads * GPT_OSS.head_dim * 4
    assert resident(tmp_path, "window", *range(8000, 600, -700)) < longest + layer / 8


def test_a_text_that_is_broken_off_leaves_no_windows(tmp_path: Path) -> None:
    """Its decode is undone, and no later token passes its rows by."""
    whole = resident(tmp_path, "window", 16000, 600)
    layer = 16000 * 2 * GPT_OSS.kv_heads * GPT_OSS.head_dim * 4
    assert resident(tmp_path, "window", 16000, 600, probe=BROKEN_PROBE) < whole + layer / 32


def test_unknown_words_are_refused(gpt_oss: Path) -> None:
    with pytest.raises(ProfileError, match="window_cache is 'half'; expected auto, window or full"):
        opened(gpt_oss, "half")


@pytest.mark.gpu
def test_a_gpu_gives_pieces_of_windows_back(tmp_path: Path) -> None:
    if not any(d["kind"] == "cuda" and not _core.device_problem(d) for d in _core.devices()):
        pytest.skip(f"no GPU: {_core.no_cuda_reason()}")
    shape = replace(GPT_OSS, n_layers=4, metadata={**GPT_OSS.metadata, "context_length": 16384})
    path = random_model(tmp_path / "m.gguf", shape)
    text = tokens(7, 16000, shape)
    full, s = (opened(path, mode, "cuda:0", ctx=16384, sequences=2) for mode in ("full", "window"))
    assert (full.plan["cache_window"], s.plan["cache_window"]) == (0, shape.window)
    assert s.gpu_cache_bytes == 0
    whole = 2 * 2 * 16384 * shape.kv_heads * shape.head_dim * 4  # two layers, keys and values
    for slot in (1, 0):
        for part in np.split(text, [15000, 15001]):
            a, b = (each.decode([(slot, part)], "last")[0] for each in (full, s))
            assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
    assert s.gpu_cache_bytes < 2 * (whole + (48 << 20))
    assert s.gpu_cache_bytes <= s.plan["kv_bytes"] < full.gpu_cache_bytes
    # A copy has the rows of its window, and a sequence can begin again where rows were given back.
    s.copy_prefix(0, 1, 15900)
    full.copy_prefix(0, 1, 15900)
    s.rewind(0, 0)
    full.rewind(0, 0)
    for slot, part in ((1, text[15900:]), (0, text[:3000]), (0, text[3000:3001])):
        a, b = (each.decode([(slot, part)], "last")[0] for each in (full, s))
        assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
    drawn = []
    for each in (full, s):
        generation = each.generation(text[:2000], slot=0)
        generation.queue(np.zeros(900, np.float32))
        drawn.append([generation.next() for _ in range(900)])
    assert drawn[0][:20] == drawn[1][:20]


@pytest.mark.gpu
def test_a_gpu_keeps_stops_between_pieces(tmp_path: Path) -> None:
    if not any(d["kind"] == "cuda" and not _core.device_problem(d) for d in _core.devices()):
        pytest.skip(f"no GPU: {_core.no_cuda_reason()}")
    shape = replace(WIDE, metadata=WINDOWED_GPT_OSS.metadata)
    path = random_model(tmp_path / "m.gguf", shape)
    full, s = (opened(path, mode, "cuda:0", ctx=16384, sequences=2) for mode in ("full", "window"))
    stride = 8 * 1024  # a piece holds 1024 rows of 8 heads of 64 elements, f32
    assert s.plan["window_stride"] == stride
    text, other = tokens(18, 15000, shape), tokens(19, 600, shape)
    for each in (full, s):
        for part in np.split(text, [14000]):
            each.decode([(0, part)], "none")
    assert [s.rewindable(p) for p in (15000, 14000, 9000, stride, stride - 1)] == [
        15000,
        14000,
        stride,
        stride,
        0,
    ]
    assert s.gpu_cache_bytes < full.gpu_cache_bytes
    for each in (full, s):
        each.copy_prefix(0, 1, stride)
        each.rewind(stride)
    for slot in (0, 1):
        for part in np.split(other, [500, 501]):
            a, b = (each.decode([(slot, part)], "last")[0] for each in (full, s))
            assert a is not None
            assert b is not None
            assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
