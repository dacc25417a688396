"""Every architecture on a GPU against float32 logits of the public reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DeviceError, PlanError, ProfileError

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]

gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(TINY / f"{name}-tiny.golden.npz") as data:
        return {key: data[key] for key in data.files}


def open_session(
    name: str, numerics: str, context: dict[str, Any] | None = None, **session: Any
) -> _core.Session:
    load = {"device": "cuda:0", "numerics": numerics}
    context = {"ctx": 256, **(context or {})}
    return _core.Session(TINY / f"{name}-tiny.gguf", load=load, context=context, session=session)


def decode(s: _core.Session, tokens: np.ndarray, rows: str = "all", **kw: Any) -> np.ndarray:
    return s.decode([(0, np.ascontiguousarray(tokens, np.int32))], rows, **kw)[0]


class TestExact:
    pytestmark = gpu

    @pytest.mark.parametrize("name", NAMES)
    def test_prompts_and_single_tokens(self, name: str) -> None:
        g = golden(name)
        s = open_session(name, "exact", {"kv_type_k": "f32", "kv_type_v": "f32"}, ubatch=23)
        for which in ("short", "long"):
            s.reset()
            logits = decode(s, g[f"tokens_{which}"])
            assert nmse(logits, g[f"logits_{which}"]) < 1e-7
        s.reset()
        for graphs in {False, _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] == "ON"}:
            s.set({"cuda_graphs": graphs})
            s.reset()
            rows = [decode(s, token.reshape(1))[0] for token in g["tokens_short"]]
            assert nmse(np.stack(rows), g["logits_short"]) < 1e-7, f"cuda_graphs={graphs}"

    @pytest.mark.parametrize("name", NAMES)
    def test_sequences_in_one_batch(self, name: str) -> None:
        g = golden(name)
        tokens = g["tokens_long"].astype(np.int32)
        s = open_session(name, "exact", {"kv_type_k": "f32", "kv_type_v": "f32", "sequences": 3}, ubatch=19)
        sizes = {2: 3, 0: 41, 1: 17}
        logits = s.decode([(slot, tokens[:n].copy()) for slot, n in sizes.items()], "all")[0]
        want = np.concatenate([g["logits_long"][:n] for n in sizes.values()])
        assert nmse(logits, want) < 1e-7
        for _ in range(4):
            step = [(slot, tokens[s.position(slot)].reshape(1)) for slot in sizes]
            want = np.stack([g["logits_long"][s.position(slot)] for slot in sizes])
            assert nmse(s.decode(step, "last")[0], want) < 1e-7

    def test_last_row_alone_equals_the_last_of_all(self) -> None:
        for name in NAMES:
            g = golden(name)
            s = open_session(name, "exact", {"kv_type_k": "f32", "kv_type_v": "f32"}, ubatch=16)
            every = decode(s, g["tokens_short"])
            s.reset()
            assert nmse(decode(s, g["tokens_short"], "last")[0], every[-1]) < 1e-9, name


def with_cache(kv: str) -> list[str]:
    """The models whose rows of the cache hold whole blocks of this type."""
    names = []
    for name in NAMES:
        try:
            _core.Session(
                TINY / f"{name}-tiny.gguf",
                load={"device": "cpu"},
                context={"ctx": 256, "kv_type_k": kv, "kv_type_v": kv},
                plan_only=True,
            )
        except PlanError:
            continue
        names.append(name)
    assert len(names) >= len(NAMES) // 2
    return names


def routed(name: str, tokens: np.ndarray, context: dict[str, Any]) -> np.ndarray:
    """Logits of the default numerics with the experts that the exact computation picks."""
    exact = open_session(name, "exact", {"kv_type_k": "f32", "kv_type_v": "f32"})
    if exact.model["moe_layers"] == 0:
        return decode(open_session(name, "default", context), tokens)
    ids = [(0, np.ascontiguousarray(tokens, np.int32))]
    routing = exact.decode(ids, "none", capture_routing=True)[1]
    return open_session(name, "default", context).decode(ids, "all", pinned_routing=routing)[0]


class TestDefault:
    pytestmark = gpu

    @pytest.mark.parametrize("name", NAMES)
    def test_with_pinned_routing(self, name: str) -> None:
        g = golden(name)
        for which in ("short", "long"):
            assert nmse(routed(name, g[f"tokens_{which}"], {}), g[f"logits_{which}"]) < 1e-5

    @pytest.mark.parametrize("sequences", [5, 12])  # of the lists for few tokens and for dozens
    @pytest.mark.parametrize("fusion", [True, False])
    @pytest.mark.parametrize("name", NAMES)
    def test_single_tokens_and_few(self, name: str, fusion: bool, sequences: int) -> None:
        """With the routing pinned, token by token, replayed and not, then several sequences at once."""
        g = golden(name)
        tokens = g["tokens_short"].astype(np.int32)
        exact = open_session(name, "exact", {"kv_type_k": "f32", "kv_type_v": "f32"})
        routing = None
        if exact.model["moe_layers"]:
            routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
        s = open_session(name, "default", {"sequences": sequences}, fusion=fusion)
        assert {op["list"] for op in s.ops(1)} == {"fused" if fusion else "general", "draw"}
        rows = []
        for i, token in enumerate(tokens):
            pinned = None if routing is None else np.ascontiguousarray(routing[:, i : i + 1])
            rows.append(decode(s, token.reshape(1), pinned_routing=pinned)[0])
        assert nmse(np.stack(rows), g["logits_short"]) < 1e-5
        # The other sequences hold what sequence 0 held: equal rows, and the same without a graph.
        n = len(tokens) - 3
        for slot in range(sequences):
            s.reset(slot)
            s.decode([(slot, tokens[:n].copy())], "none")
        place = s.checkpoint(0)  # a recurrent state cannot be rewound
        alone = [decode(s, tokens[n + i : n + i + 1])[0] for i in range(3)]
        s.restore(place)
        for i in range(3):
            next_token = tokens[n + i : n + i + 1]
            together = s.decode([(slot, next_token.copy()) for slot in range(sequences)], "last")[0]
            assert max(nmse(row, alone[i]) for row in together) < 1e-5

    @pytest.mark.parametrize("kv", ["f16", "q8_0"])
    def test_replayed_tokens_equal_launched_ones(self, kv: str) -> None:
        for name in with_cache(kv):
            tokens = golden(name)["tokens_long"].astype(np.int32)
            s = open_session(name, "default", {"kv_type_k": kv, "kv_type_v": kv}, cuda_graphs=False)
            launched = [decode(s, t.reshape(1)) for t in tokens]
            if _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] == "ON":
                s.set({"cuda_graphs": True})
            s.reset()
            for token, want in zip(tokens, launched, strict=True):
                np.testing.assert_array_equal(decode(s, token.reshape(1)), want, err_msg=name)

    @pytest.mark.parametrize("sequences", [1, 3])
    def test_products_beside_each_other_give_the_same_bits(self, sequences: int) -> None:
        """graph_concurrency: captured graphs with q, k and v on streams of their own."""
        if _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] != "ON":
            pytest.skip("a build without CUDA graphs")
        for name in NAMES:
            tokens = golden(name)["tokens_long"].astype(np.int32)[:24]
            answers = []
            for concurrent in (False, True):
                s = open_session(
                    name, "default", {"sequences": sequences}, fusion=False, graph_concurrency=concurrent
                )
                rows = []
                for token in tokens:
                    batch = [(slot, token.reshape(1)) for slot in range(sequences)]
                    rows.append(s.decode(batch, "last")[0])
                answers.append(np.stack(rows))
            np.testing.assert_array_equal(answers[1], answers[0], err_msg=name)

    @pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0"])
    def test_without_flash_attention(self, kv: str) -> None:
        """The float32 kernels over any cache, for prompts and replayed tokens, and back."""
        for name in with_cache(kv):
            tokens = golden(name)["tokens_long"].astype(np.int32)
            cache = {"kv_type_k": kv, "kv_type_v": kv}
            exact = open_session(name, "exact", cache)
            moe = bool(exact.model["moe_layers"])
            want, routing = exact.decode([(0, tokens)], "all", capture_routing=moe)
            s = open_session(name, "default", cache, flash_attention=False, mla_mode="absorbed")
            got = decode(s, tokens, pinned_routing=routing)
            assert nmse(got, want) < 1e-4, name
            s.reset()
            rows = [
                decode(
                    s,
                    t.reshape(1),
                    pinned_routing=None if routing is None else np.ascontiguousarray(routing[:, i : i + 1]),
                )
                for i, t in enumerate(tokens[:8])
            ]
            assert nmse(np.concatenate(rows), want[:8]) < 1e-4, name

    @pytest.mark.parametrize("kv", ["bf16", "q8_0"])
    def test_other_caches(self, kv: str) -> None:
        for name in with_cache(kv):
            g = golden(name)
            got = routed(name, g["tokens_long"], {"kv_type_k": kv, "kv_type_v": kv})
            assert nmse(got, g["logits_long"]) < 1e-2, name

    def test_top1(self) -> None:
        agree = total = 0
        for name in NAMES:
            g = golden(name)
            s = open_session(name, "default")
            for which in ("short", "long"):
                s.reset()
                best = decode(s, g[f"tokens_{which}"]).argmax(-1)
                agree += int((best == g[f"logits_{which}"].argmax(-1)).sum())
                total += len(g[f"tokens_{which}"])
        assert agree / total >= 0.995


class TestLatentAttention:
    """Both ways of latent attention, over the default f32 cache and over halves.

    What halves lose, 27 narrow layers amplify.
    """

    pytestmark = gpu
    LIMITS = {  # noqa: RUF012
        ("deepseek2-lite", "f16"): 1e-3,
        ("deepseek2-v3", "f16"): 1e-5,
        ("deepseek2-lite", "f32"): 1e-5,
        ("deepseek2-v3", "f32"): 1e-5,
    }

    @pytest.mark.parametrize("mode", ["expanded", "absorbed", "auto"])
    @pytest.mark.parametrize(("name", "cache"), sorted(LIMITS))
    def test_prompts_and_single_tokens(self, name: str, cache: str, mode: str) -> None:
        g = golden(name)
        tokens = np.ascontiguousarray(g["tokens_long"], np.int32)
        exact = open_session(name, "exact", {"kv_type_k": "f32"})
        routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
        context = {"kv_type_k": "f16"} if cache == "f16" else {}
        s = open_session(name, "default", context, mla_mode=mode, ubatch=48)
        assert {op["list"] for op in s.ops(48)} == {"batched" if mode == "absorbed" else "expanded"}
        got = s.decode([(0, tokens)], "all", pinned_routing=routing)[0]
        assert nmse(got, g["logits_long"]) < self.LIMITS[name, cache]
        s.rewind(100)
        for at in range(100, 106):
            pinned = routing[:, at : at + 1].copy()
            one = s.decode([(0, tokens[at : at + 1])], "last", pinned_routing=pinned)[0]
            assert nmse(one[0], g["logits_long"][at]) < self.LIMITS[name, cache]

    @pytest.mark.parametrize(("name", "cache"), sorted(LIMITS))
    def test_ubatches_that_use_keys_of_earlier_ones(self, name: str, cache: str) -> None:
        """A layer keeps the rows of one sequence, up to the position where the sequence got other tokens."""
        g = golden(name)
        tokens, want = np.ascontiguousarray(g["tokens_long"], np.int32), g["logits_long"]
        exact = open_session(name, "exact", {"kv_type_k": "f32"})
        routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
        s = open_session(name, "default", {"kv_type_k": cache, "sequences": 3}, ubatch=40)
        assert "each layer keeps them" in s.describe_plan()

        def check(slot: int, begin: int, end: int) -> None:
            pinned = np.ascontiguousarray(routing[:, begin:end])
            got = s.decode([(slot, tokens[begin:end].copy())], "all", pinned_routing=pinned)[0]
            assert nmse(got, want[begin:end]) < self.LIMITS[name, cache], (slot, begin, end)

        def others(slot: int, count: int) -> None:
            """Tokens that do not belong there, as a prompt or one by one."""
            wrong = np.ascontiguousarray(tokens[::-1][:count])
            for part in [wrong] if count >= 32 else wrong.reshape(-1, 1):
                s.decode([(slot, part.copy())], "none")

        check(0, 0, 75)
        check(0, 75, 110)
        for count in (40, 5):  # the sequence goes back, and gets other rows first
            s.rewind(50)
            others(0, count)
            s.rewind(50)
            check(0, 50, 110)
        s.rewind(60)
        others(0, 3)
        others(0, 40)  # from position 63 on
        s.rewind(60)
        check(0, 60, 120)
        others(1, 45)  # another sequence takes the memory
        check(0, 120, 150)
        s.rewind(70)
        s.copy(0, 1)  # over rows that are kept
        check(1, 70, 150)
        check(0, 70, 150)
        s.reset(2)
        others(2, 40)
        s.reset(2)
        check(2, 0, 150)

    @pytest.mark.parametrize("name", ["deepseek2-lite", "deepseek2-v3"])
    def test_one_session_with_and_without_flash_attention(self, name: str) -> None:
        """Keys and values of an f32 cache may be f16 pairs for one, and are float32 for the other."""
        g = golden(name)
        tokens = np.ascontiguousarray(g["tokens_long"], np.int32)
        exact = open_session(name, "exact", {"kv_type_k": "f32"})
        routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
        s = open_session(name, "default", mla_mode="expanded", ubatch=48)
        for flash in (True, False, True):
            s.set({"flash_attention": flash})
            s.reset()
            (attention,) = [op for op in s.ops(48) if op["family"] == "attention"]
            assert (attention["config"]["variant"] == "rows") == (not flash)
            got = s.decode([(0, tokens)], "all", pinned_routing=routing)[0]
            assert nmse(got, g["logits_long"]) < self.LIMITS[name, "f32"]

    @pytest.mark.parametrize(("name", "cache"), sorted(LIMITS))
    def test_sequences_in_one_batch(self, name: str, cache: str) -> None:
        g = golden(name)
        tokens = np.ascontiguousarray(g["tokens_long"], np.int32)
        exact = open_session(name, "exact", {"kv_type_k": "f32"})
        routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
        context = {"kv_type_k": cache, "sequences": 3}
        s = open_session(name, "default", context, mla_mode="expanded", ubatch=70)
        done = dict.fromkeys((2, 0, 1), 0)
        for sizes in ({2: 3, 0: 61, 1: 17}, {0: 40, 1: 1, 2: 90}):
            parts = [slice(done[slot], done[slot] + n) for slot, n in sizes.items()]
            pinned = np.concatenate([routing[:, part] for part in parts], axis=1)
            batch = [(slot, tokens[part].copy()) for slot, part in zip(sizes, parts, strict=True)]
            got = s.decode(batch, "all", pinned_routing=np.ascontiguousarray(pinned))[0]
            want = np.concatenate([g["logits_long"][part] for part in parts])
            assert nmse(got, want) < self.LIMITS[name, cache]
            for slot, n in sizes.items():
                done[slot] += n


def test_names_of_devices() -> None:
    path = TINY / f"{NAMES[0]}-tiny.gguf"
    with pytest.raises(ProfileError, match="expected cpu, cpu:N, cuda or cuda:N"):
        _core.Session(path, load={"device": "gpu0"})
    with pytest.raises(DeviceError, match="cuda:77"):
        _core.Session(path, load={"device": "cuda:77"})
