"""The engine's door with real models: what it gives, what it refuses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import DeviceError, GgufError, ModelError, PlanError, ProfileError, _core, explain, profiles
from dyno._vocabulary import TokenType
from dyno.diagnostics import Diagnostics
from dyno.quality import nmse
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKENS = [5, 9, 200, 17, 3, 44, 80, 121, 6, 7]


@pytest.fixture(autouse=True)
def _no_profiles_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DYNO_SITE_PROFILES", str(tmp_path / "site"))
    monkeypatch.setattr("dyno.profiles.layers.shipped_folder", lambda: tmp_path / "shipped")


@pytest.fixture
def tiny(tiny_dir: Path) -> Path:
    return tiny_dir / "qwen3moe-tiny.gguf"


@pytest.fixture
def engine(tiny: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(tiny, profile=None, sequences=3, ctx=64, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(trained_model: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(trained_model, profile=None) as opened:
        yield opened


# ---- logits ----


def test_rows(engine: dyno.Engine) -> None:
    n_vocab = engine.model["n_vocab"]
    everything = engine.logits(TOKENS)
    assert everything.shape == (len(TOKENS), n_vocab)
    assert everything.dtype == np.float32
    last = engine.logits(TOKENS, rows="last")
    assert last.shape == (1, n_vocab)
    assert nmse(everything[-1:], last) < 1e-8
    assert engine.logits(TOKENS, rows="none").shape == (0, n_vocab)


def test_appending_is_what_one_call_gives(engine: dyno.Engine) -> None:
    whole = engine.logits(TOKENS)
    first = engine.logits(TOKENS[:4])
    assert engine.position() == 4
    rest = engine.logits(TOKENS[4:], reset=False)
    assert engine.position() == len(TOKENS)
    assert nmse(whole, np.concatenate([first, rest])) < 1e-5
    np.testing.assert_array_equal(engine.logits(TOKENS), whole)  # a reset forgets


def test_rewind(engine: dyno.Engine) -> None:
    whole = engine.logits(TOKENS)
    engine.rewind(4)
    assert engine.position() == 4
    assert nmse(whole[4:], engine.logits(TOKENS[4:], reset=False)) < 1e-5


def test_several_sequences_give_what_each_gives_alone(engine: dyno.Engine) -> None:
    prompts = {2: TOKENS, 0: TOKENS[:3], 1: list(reversed(TOKENS))}
    alone = {slot: engine.logits(tokens) for slot, tokens in prompts.items()}
    together = engine.logits_batch(prompts)
    assert list(together) == [2, 0, 1]
    for slot, logits in alone.items():
        assert together[slot].shape == logits.shape
        assert nmse(logits, together[slot]) < 1e-5
    last = engine.logits_batch({1: [4], 2: [5, 6]}, reset=False, rows="last")
    assert {slot: rows.shape[0] for slot, rows in last.items()} == {1: 1, 2: 1}
    assert [engine.position(slot) for slot in range(3)] == [3, len(TOKENS) + 1, len(TOKENS) + 2]


def test_routing_can_be_captured_and_pinned(engine: dyno.Engine) -> None:
    logits, routing = engine.diagnostics.logits_with_routing(TOKENS)
    assert routing.shape == (engine.model["moe_layers"], len(TOKENS), engine.model["experts_used"])
    pinned = engine.diagnostics.logits(TOKENS, pinned_routing=routing)
    assert nmse(logits, pinned) < 1e-10
    other = engine.diagnostics.logits(TOKENS, pinned_routing=(routing + 1) % engine.model["experts"])
    assert nmse(logits, other) > 1e-6


def test_dense_models_have_no_routing(tiny_dir: Path) -> None:
    with dyno.Engine(tiny_dir / "llama-tiny.gguf", profile=None) as dense, pytest.raises(PlanError):
        dense.diagnostics.logits_with_routing(TOKENS)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "non-empty"),
        ([[1, 2]], "shape"),
        ([0.5], "float64"),
        ("text", "list of whole numbers, not 'text'"),
        (None, "list of whole numbers, not None"),
        ([-1], "-1"),
        ([320], "320"),
        ([2**40], str(2**40)),
        ([1] * 65, "65 tokens from position 0 do not fit into ctx=64"),
    ],
)
def test_impossible_tokens(engine: dyno.Engine, tokens: Any, message: str) -> None:
    engine.logits(TOKENS[:2])
    with pytest.raises(PlanError, match=message):
        engine.logits(tokens)
    assert engine.logits(TOKENS).shape[0] == len(TOKENS)  # and goes on


def test_tokens_may_be_an_array_of_another_library(engine: dyno.Engine) -> None:
    """Such as a tensor of PyTorch on the CPU. One on a GPU refuses to become a NumPy array."""

    class Tensor:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.array(TOKENS)

    class OnGpu(Tensor):
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            raise TypeError("no implicit conversion")

    tokens: Any = Tensor()
    assert np.array_equal(engine.logits(tokens), engine.logits(TOKENS))
    with pytest.raises(PlanError, match="one list of whole numbers: no implicit conversion"):
        engine.logits(OnGpu())  # type: ignore[arg-type]


def test_past_the_context(engine: dyno.Engine) -> None:
    engine.logits([1] * 60, rows="none")
    with pytest.raises(PlanError, match="5 tokens from position 60"):
        engine.logits([1] * 5, reset=False)
    assert engine.logits([1] * 4, reset=False).shape[0] == 4


def test_a_larger_context_is_advised_only_where_one_is_possible(tiny: Path) -> None:
    n = _core.describe_model(str(tiny))["n_ctx_train"]
    with dyno.Engine(tiny, profile=None, ctx=n - 1) as one, dyno.Engine(tiny, profile=None, ctx=n) as all_:
        uses: tuple[Callable[[dyno.Engine, int], object], ...] = (
            lambda engine, count: engine.logits([1] * count),
            lambda engine, count: engine.generate([1] * count),
        )
        for use in uses:
            with pytest.raises(PlanError, match=f"ctx={n} or more, on a command line -c {n} .the model"):
                use(one, n)
            for engine in (
                one,
                all_,
            ):  # it once said "a larger ctx" if that of the engine was not the largest
                with pytest.raises(
                    PlanError, match=f"no ctx is long enough: the model supports at most {n} positions"
                ):
                    use(engine, n + 1)
        array = np.ones(n, np.int32)
        with pytest.raises(PlanError, match=f"open the model with ctx={n} or more"):
            one._session.decode([(0, array)])
        with pytest.raises(
            PlanError, match=f"no ctx is long enough: the model supports at most {n} positions"
        ):
            one._session.decode([(0, np.ones(n + 1, np.int32))])


def test_slots_and_rows_that_do_not_exist(engine: dyno.Engine) -> None:
    with pytest.raises(PlanError, match="slot 3 does not exist"):
        engine.logits_batch({3: TOKENS})
    with pytest.raises(PlanError, match="rows must be"):
        engine.logits(TOKENS, rows="first")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the batch holds no sequence; give at least one slot"):
        engine.logits_batch({})


# ---- settings ----


def test_a_setting_of_another_kind_names_what_changes_it(engine: dyno.Engine) -> None:
    with pytest.raises(PlanError, match=r"'ctx' is a context setting: call set_context\(ctx=32\)"):
        engine.set(ctx=32)
    with pytest.raises(PlanError, match=r"'ubatch' is a session setting: call set\(ubatch=32\)"):
        engine.set_context(ubatch=32)
    with pytest.raises(PlanError, match="'cpu_repack' is a load setting: it cannot change while"):
        engine.set(cpu_repack=False)


def test_set_changes_session_settings_and_keeps_the_context(engine: dyno.Engine) -> None:
    whole = engine.logits(TOKENS)
    engine.logits(TOKENS[:5])
    engine.set(ubatch=2, threads=2)
    assert (engine.settings["ubatch"], engine.settings.origins["ubatch"]) == (2, "argument")
    assert engine.plan["settings"]["ubatch"] == 2
    assert engine.position() == 5
    assert nmse(whole[5:], engine.logits(TOKENS[5:], reset=False)) < 1e-5


def test_set_refuses_what_needs_a_reload(engine: dyno.Engine) -> None:
    for arguments in ({"cpu_repack": False}, {"ctx": 32}, {"ubatsch": 3}, {"ubatch": 0}):
        with pytest.raises(PlanError):
            engine.set(**arguments)
    assert engine.settings["ubatch"] == 512


def test_set_context_empties_the_cache(engine: dyno.Engine) -> None:
    engine.logits(TOKENS)
    engine.set_context(ctx=16, kv_type_k="f32", kv_type_v="f32")
    assert engine.position() == 0
    assert engine.settings["ctx"] == 16
    with pytest.raises(PlanError):
        engine.logits([1] * 17)
    assert engine.logits(TOKENS).shape[0] == len(TOKENS)


def test_threads_do_not_change_the_answer(tiny: Path) -> None:
    results = []
    for threads in (1, 3):
        with dyno.Engine(tiny, profile=None, threads=threads) as opened:
            results.append(opened.logits(TOKENS))
    np.testing.assert_array_equal(*results)


def test_settings_have_origins_and_plan_adds_up(engine: dyno.Engine) -> None:
    assert engine.settings.origins["sequences"] == "argument"
    assert engine.settings.origins["kv_type_k"] == "default"
    plan = engine.plan
    assert plan["total_bytes"] >= plan["weights_bytes"] + plan["kv_bytes"] + plan["arena_bytes"]
    assert len(plan["tensors"]) > 0
    assert "ctx" in engine.describe_plan() or "context" in engine.describe_plan()


def test_every_op_says_why(engine: dyno.Engine) -> None:
    found = engine.describe_ops()
    assert {"matmul", "attention", "norm", "moe_route"} <= {op["family"] for op in found}
    assert all(op["reason"] and op["config"]["variant"] for op in found)


# ---- opening ----


def test_impossible_files_and_devices(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(GgufError, match="missing"):
        dyno.Engine(tmp_path / "missing.gguf")
    (tmp_path / "noise.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(GgufError):
        dyno.Engine(tmp_path / "noise.gguf")
    with pytest.raises(DeviceError, match="'cuda:999'"):
        dyno.Engine(tiny, device="cuda:999")
    with pytest.raises(DeviceError, match="'tpu'"):
        dyno.Engine(tiny, device="tpu")


def test_context_past_the_limit_of_the_model(tiny: Path) -> None:
    with pytest.raises(PlanError, match="1000000"):
        dyno.Engine(tiny, ctx=1_000_000)


def test_unknown_setting_names_the_nearest(tiny: Path) -> None:
    with pytest.raises(PlanError, match="'kv_type_key'; did you mean 'kv_type_k'"):
        dyno.Engine(tiny, kv_type_key="f16")


def test_close(tiny: Path) -> None:
    opened = dyno.Engine(tiny, profile=None)
    opened.close()
    opened.close()
    assert "closed" in repr(opened)
    with pytest.raises(PlanError, match="closed"):
        opened.logits(TOKENS)


# ---- profiles ----


def write_profile(engine: dyno.Engine, path: Path, text: str) -> None:
    """A profile for this machine and the engine's model with the given settings and kernels."""
    from dyno import _selection

    device, model, build = _selection.identities(engine.path, engine.model, engine.device_info)
    match = profiles.Match(device=device, model=model, engine=build)
    profile = profiles.Profile(schema=1, label="test", match=match)  # type: ignore[call-arg]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profiles.dumps_profile(profile) + text)


def test_a_profile_is_found_and_its_lines_are_origins(engine: dyno.Engine, tiny: Path) -> None:
    path = profiles.user_folder() / "mine.yaml"
    write_profile(engine, path, "settings:\n  ubatch: {value: 64, default: 512}\n  threads: default\n")
    with dyno.Engine(tiny, require_profile=True) as opened:
        assert opened.match.headline == "profile: mine.yaml (exact match)"
        assert opened.match.path == str(path)
        assert opened.profile is opened.match
        assert opened.settings["ubatch"] == 64
        assert opened.settings.origins["ubatch"].startswith("mine.yaml:")
        assert opened.settings.origins["threads"] == "default"
    with dyno.Engine(tiny, ubatch=32) as opened:
        assert (opened.settings["ubatch"], opened.settings.origins["ubatch"]) == (32, "argument")
    with dyno.Engine(tiny, profile=None) as opened:
        assert opened.profile is None
        assert opened.settings["ubatch"] == 512
    with dyno.Engine(tiny, numerics="exact") as opened:  # the reference depends on no folder
        assert opened.profile is None


def test_no_profile_where_one_is_required(tiny: Path) -> None:
    with pytest.raises(ProfileError, match="required"):
        dyno.Engine(tiny, require_profile=True)


@pytest.mark.parametrize(
    ("family", "entry"),
    [("matmul", "variant: no_such_variant"), ("attention", "variant: flash_split, splits: 8")],
    ids=("unknown", "removed"),
)
def test_a_kernel_that_is_not_supported_falls_back_loudly_with_its_group(
    engine: dyno.Engine,
    tiny: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    entry: str,
) -> None:
    key = next(op["key"] for op in engine.describe_ops() if op["family"] == family)
    name = entry.split(",")[0].removeprefix("variant: ")
    path = tmp_path / "odd.yaml"
    text = (
        "settings:\n  ubatch: {value: 64, group: g1}\n"
        f'kernels:\n  "{key}": {{m1-8: {{{entry}, group: g1}}}}\n'
    )
    write_profile(engine, path, text)
    whole = engine.logits(TOKENS)
    with caplog.at_level(logging.WARNING, "dyno"), dyno.Engine(tiny, profile=path) as opened:
        assert opened.settings["ubatch"] == 512  # fell with its group
        assert {row["status"] for row in opened.kernel_report()} == {"rejected"}
        assert nmse(whole, opened.logits(TOKENS)) < 1e-5
        assert any(name in line for line in opened.fallbacks)
        (shown,) = (line for line in explain.ops(opened, 1)[1].splitlines() if f"{key} m1-8: " in line)
        assert shown.split()[0] == "rejected"
        assert name in shown
    assert any(name in record.getMessage() for record in caplog.records)
    with pytest.raises(ProfileError, match="required"):
        dyno.Engine(tiny, profile=path, require_profile=True)


# ---- text ----


def test_tokens_of_the_reference(trained: dyno.Engine, eval_text: Path) -> None:
    text = eval_text.read_text(encoding="utf-8")[:20_000]
    assert trained.detokenize(trained.tokenize(text)) == text


def test_text_completes_python_and_is_repeatable(trained: dyno.Engine) -> None:
    prompt = "def read_file(path):\n    with open(path"
    texts = ["".join(trained.generate(prompt, max_tokens=24)) for _ in range(2)]
    assert texts[0] == texts[1]
    line = prompt + texts[0].splitlines()[0]
    compile(line + "\n        pass\n" if line.endswith(":") else line, "completion", "exec")


def test_generation_is_the_argmax_of_the_logits(trained: dyno.Engine) -> None:
    tokens = trained.tokenize("import os\n")
    expected = []
    for _ in range(8):
        expected.append(int(trained.logits(tokens + expected, rows="last")[-1].argmax()))
    assert "".join(trained.generate(tokens, max_tokens=8)) == trained.detokenize(expected)


def test_seed_and_stop(trained: dyno.Engine) -> None:
    arguments: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    texts = ["".join(trained.generate("class ", seed=seed, **arguments)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    stopped = "".join(trained.generate("def f(x):\n    return", max_tokens=40, stop="\n"))
    assert "\n" not in stopped


def test_impossible_prompts(trained: dyno.Engine) -> None:
    with pytest.raises(PlanError, match="prompt is empty"):
        trained.generate("")
    with pytest.raises(PlanError, match="5000 tokens"):
        trained.generate([1] * 5000)
    with pytest.raises(PlanError, match="temperature"):
        trained.generate("x", temperature=-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"top_p": None}, "top_p must be a number, not None"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"seed": "7"}, "seed must be a whole number, not '7'"),
        ({"max_tokens": "9"}, "max_tokens must be a whole number of at least 0, not '9'"),
        ({"max_tokens": -1}, "max_tokens must be a whole number of at least 0, not -1"),
        ({"stop": 5}, "stop must be a string or a list of strings, not 5"),
        ({"stop": ["a", 5]}, "stop must be a string or a list of strings"),
    ],
)
def test_arguments_of_the_wrong_type(trained: dyno.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        trained.generate(**{"prompt": "x", **arguments})
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.int64(1)}
    assert len(list(trained.generate("x", max_tokens=np.int64(1), **numbers))) <= 1


def test_text_that_is_no_string(trained: dyno.Engine) -> None:
    wrong: tuple[Any, ...] = (5, None, b"x", ["x"])
    for text in wrong:
        with pytest.raises(PlanError, match=r"\[tokenizer\] text must be a string, not "):
            trained.tokenize(text)


def test_names_of_control_tokens_can_stay_text(trained: dyno.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = trained.tokenizer.vocabulary
    name = next(t for t, k in zip(vocabulary.tokens, vocabulary.types, strict=True) if k == TokenType.CONTROL)
    fed: list[list[int]] = []

    def written(_: object, tokens: list[int], *__: object, **___: object) -> Iterator[str]:
        fed.append(tokens)
        return iter(())

    monkeypatch.setattr("dyno.engine.written", written)
    trained.generate(name)
    trained.generate(name, parse_special=False)
    assert fed == [trained.tokenize(name, parse_special=special) for special in (True, False)]
    assert fed[0] != fed[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_a_text_with_the_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    path = tiny_model(tmp_path / "broken.gguf", n_ctx=64)
    norm = bytes(_core.Gguf(str(path)).raw("output_norm.weight"))
    whole = bytearray(path.read_bytes())
    at = whole.index(norm)
    whole[at : at + 4] = np.float32(bad).tobytes()
    path.write_bytes(whole)
    with dyno.Engine(path, profile=None) as broken:
        assert not np.isfinite(broken.logits([1, 2, 3])).all()  # logits may say so
        for on_device in (False, True):
            monkeypatch.setattr(Diagnostics, "draws_on_device", on_device)
            with pytest.raises(ModelError, match="logits after position 2 are not finite"):
                list(broken.generate([1, 2, 3], max_tokens=4))
        broken.reset()  # the slot is free again
        with pytest.raises(ModelError, match="logits after position 0 are not finite"):
            broken.diagnostics.greedy_after([1, 2])


def test_generation_ends_with_the_context(trained_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dyno.Engine(trained_model, profile=None, ctx=16) as small:
        text = "".join(small.generate("def f():\n", max_tokens=100))
        assert small.position() == 16
    assert text
    assert any("context of 16 tokens is full" in record.getMessage() for record in caplog.records)


def test_a_file_without_a_vocabulary_opens_and_only_text_fails(tmp_path: Path, tiny: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(tiny)
    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if array else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with dyno.Engine(path, profile=None) as bare, dyno.Engine(tiny, profile=None) as whole:
        np.testing.assert_array_equal(bare.logits(TOKENS), whole.logits(TOKENS))
        with pytest.raises(ModelError, match="no vocabulary"):
            bare.tokenize("x")
        with pytest.raises(ModelError, match="no vocabulary"):
            bare.generate("x")


def test_a_plan_needs_no_weights(tiny_dir: Path) -> None:
    path = tiny_dir / "qwen3moe-tiny.gguf"
    with (
        dyno.Engine(path, profile=None) as loaded,
        dyno.Engine(path, profile=None, plan_only=True) as planned,
    ):
        assert planned.plan == loaded.plan
        assert planned.describe_ops() == loaded.describe_ops()
        assert planned.describe_plan() == loaded.describe_plan()
        planned.set(ubatch=7)
        assert planned.plan["settings"]["ubatch"] == 7
        planned.set_context(ctx=32)
        assert planned.plan["kv_bytes"] < loaded.plan["kv_bytes"]
        with pytest.raises(PlanError, match="has a plan but no weights"):
            planned.logits([1, 2, 3])


def test_a_plan_for_a_device_that_is_not_here(tiny_dir: Path) -> None:
    device = {
        "kind": "cuda",
        "name": "described",
        "compute_capability": 90,
        "sm_count": 132,
        "memory_bytes": 1 << 37,
    }
    path = str(tiny_dir / "qwen3moe-tiny.gguf")
    session = _core.Session(path, plan_only=True, device=device)
    assert session.plan["device"]["kind"] == "cuda"
    assert all(op["config"]["variant"] for op in session.ops())
    with pytest.raises(PlanError, match="needs plan_only=True"):
        _core.Session(path, device=device)


def test_a_profile_of_another_model_changes_nothing_unless_forced(
    engine: dyno.Engine, tiny: Path, trained_model: Path
) -> None:
    """A profile of a small model once put `threads: 1` on every other model of the machine."""
    path = profiles.user_folder() / "small.yaml"
    write_profile(engine, path, "settings:\n  threads: {value: 1, default: 2}\n")
    with dyno.Engine(tiny) as same:
        assert same.settings.origins["threads"].startswith("small.yaml:")
    with dyno.Engine(trained_model) as other:
        assert other.profile is None
        assert other.settings.origins["threads"] == "default"
    with pytest.raises(ProfileError, match=r"belongs to another model: .*force_profile=True"):
        dyno.Engine(trained_model, profile=path)
    with dyno.Engine(trained_model, profile=path, force_profile=True) as forced:
        assert forced.settings["threads"] == 1
    with pytest.raises(ProfileError, match="force_profile needs a profile"):
        dyno.Engine(trained_model, force_profile=True)
