"""Arguments as newcomers write them: they work, or an error names the value and the remedy."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import pytest
from dyno import DeviceError, GgufError, PlanError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def tiny(tiny_dir: Path) -> Path:
    return tiny_dir / "qwen3moe-tiny.gguf"


# ---- the path of the model ----


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, tiny: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(tiny, tmp_path / "x.gguf")
    for path in ("~/x.gguf", Path("~/x.gguf"), b"~/x.gguf"):
        with dyno.Engine(path, profile=None, plan_only=True) as engine:  # type: ignore[arg-type]
            assert engine.path == str(tmp_path / "x.gguf")
    shutil.copy(trained_model, tmp_path / "y.gguf")
    assert len(dyno.Tokenizer.from_gguf("~/y.gguf")) == len(dyno.Tokenizer.from_gguf(trained_model))


def test_a_path_need_not_be_utf8(tmp_path: Path, tiny: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.gguf"
    shutil.copy(tiny, path)
    for each in (path, os.fsdecode(path)):
        dyno.Engine(each, profile=None, plan_only=True).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 5, ["x.gguf"], "", b"", "a\0b"], ids=repr)
def test_what_is_no_path(path: Any) -> None:
    for opens in (dyno.Engine, dyno.Tokenizer.from_gguf):
        with pytest.raises(PlanError, match=r"path is .*; expected the path of a GGUF file"):
            opens(path)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("https://example.org/x.gguf", "does not download models. Download the file, and give its path"),
        (Path("hf://me/x.gguf"), "does not download models. Download the file, and give its path"),
        ("me/my-model", "dyno opens local GGUF files, and does not download models"),
        ("~nobody-has-this-name/x.gguf", "your shell has not replaced the ~"),
    ],
    ids=str,
)
def test_a_path_of_no_file_says_what_to_do(
    path: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GgufError, match=f"cannot open .*: No such file or directory; .*{advice}"):
        dyno.Engine(path)
    with pytest.raises(GgufError, match=r"/absent\.gguf: No such file or directory$"):
        dyno.Engine(tmp_path / "absent.gguf")


# ---- where it runs, and with which profile ----


@pytest.mark.parametrize(
    ("device", "near"),
    [
        (0, "cuda:0"),
        ("1", "cuda:1"),
        ("gpu", "cuda"),
        ("gpu:1", "cuda:1"),
        ("CPU", "cpu"),
        ("CUDA:0", "cuda:0"),
    ],
)
def test_names_of_devices_elsewhere(tiny: Path, device: Any, near: str) -> None:
    with pytest.raises(
        DeviceError, match=rf"unknown device {device!r}; known are .*; did you mean '{near}'\?"
    ):
        dyno.Engine(tiny, device=device)


@pytest.mark.parametrize("device", [None, True, -1, ["cpu"], "tpu"], ids=repr)
def test_what_is_no_device(tiny: Path, device: Any) -> None:
    with pytest.raises(DeviceError, match=r"unknown device .*; known are 'auto', 'cpu' and 'cuda:N'$"):
        dyno.Engine(tiny, device=device)


@pytest.mark.parametrize("profile", [True, False, 5, "", {"ctx": 5}], ids=repr)
def test_what_is_no_profile(tiny: Path, profile: Any) -> None:
    with pytest.raises(
        ProfileError, match=re.escape(f"profile is {profile!r}; expected 'auto', the path of")
    ):
        dyno.Engine(tiny, profile=profile)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_split": 5}, "tensor_split is 5; expected numbers, such as [3, 1]"),
        ({"tensor_split": "3,1"}, "tensor_split is '3,1'; expected numbers, such as [3, 1]"),
        ({"placement": 5}, "placement is 5; expected 'auto', or a list of rules"),
        ({"placement": None}, "placement is None; expected 'auto', or a list of rules"),
        ({"expert_use": 5}, "expert_use is 5; expected a file that `dyno experts` has written"),
    ],
    ids=repr,
)
def test_what_places_no_weights(tiny: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        dyno.Engine(tiny, profile=None, **arguments)


# ---- texts ----


@pytest.fixture(scope="module")
def trained(trained_model: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(trained_model, profile=None, ctx=128) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("n_predict", "did you mean 'max_tokens'?"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("temp", "did you mean 'temperature'?"),
        ("repetition_penalty", "did you mean 'repeat_penalty'?"),
        ("repeat_penaltee", "did you mean 'repeat_penalty'?"),
        ("stop_strings", "did you mean 'stop'?"),
        ("n", "complete() and chat_choices() have it"),
        ("stream", "generate() and chat() always give the answer in pieces"),
        ("zzz", "valid names: prompt, max_tokens, temperature,"),
    ],
)
def test_names_of_arguments_elsewhere(trained: dyno.Engine, name: str, hint: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"[generate] generate() has no argument {name!r}; {hint}")):
        trained.generate("x", **{name: 5})  # type: ignore[arg-type]


def test_each_method_knows_its_own_arguments(trained: dyno.Engine) -> None:
    with pytest.raises(PlanError, match=r"complete\(\) has no argument 'num_return_sequences'; .* 'n'\?"):
        trained.complete("x", num_return_sequences=2)  # type: ignore[call-arg]
    with pytest.raises(
        PlanError, match=r"chat\(\) has no argument 'chat_template'; did you mean 'template'\?"
    ):
        trained.chat([], chat_template="chatml")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("prompt", "advice"),
    [
        (None, "$"),
        (5, "$"),
        ([], "$"),
        ([1.5], "$"),
        ([[1, 2]], "$"),
        ({1, 2}, "$"),
        ({}, "$"),
        ([10**30], "$"),
        (b"x", "; decode the bytes first"),
        (["x", "y"], "; give each text to a call of its own"),
        ([{"role": "user"}], r"; for messages, use chat\(\)"),
    ],
    ids=repr,
)
def test_what_is_no_prompt(trained: dyno.Engine, prompt: Any, advice: str) -> None:
    given = re.escape(repr(prompt))
    for method in (trained.generate, trained.complete):
        with pytest.raises(
            PlanError, match=f"the prompt is {given}; expected a text or a list of token ids{advice}"
        ):
            method(prompt)


@pytest.mark.parametrize("messages", ["hi", b"hi", None, 5, {"role": "user", "content": "hi"}], ids=repr)
def test_what_is_no_conversation(trained: dyno.Engine, messages: Any) -> None:
    for template in ("chatml", None):
        with pytest.raises(
            PlanError, match=r"messages is .*; expected a list of messages, such as \[\{\"role\": \"user\""
        ):
            trained.chat(messages, template=template)


@pytest.mark.parametrize("message", ["hi", None, {}, {"content": "hi"}, {"role": 5}], ids=repr)
def test_what_is_no_message(trained: dyno.Engine, message: Any) -> None:
    with pytest.raises(PlanError, match=rf"messages\[1\] is {re.escape(repr(message))}; expected a mapping"):
        trained.chat([{"role": "user", "content": "hi"}, message], template="chatml")


def test_no_stop_strings_may_be_written_as_none(trained: dyno.Engine) -> None:
    texts = {tuple(trained.generate("def", max_tokens=4, stop=stop)) for stop in (None, (), [])}
    assert len(texts) == 1


@pytest.mark.parametrize("slot", ["a", None, 1.0, True, 1, -1], ids=repr)
def test_positions_of_slots_that_do_not_exist(trained: dyno.Engine, slot: Any) -> None:
    with pytest.raises(PlanError, match=f"slot {slot!r} does not exist"):
        trained.position(slot)


@pytest.mark.parametrize("token", [10**9, -1, 10**30])
def test_tokens_that_do_not_exist(trained: dyno.Engine, token: int) -> None:
    with pytest.raises(PlanError, match=f"token {token} is outside the vocabulary; expected 0 to 8191"):
        trained.detokenize([token])


# ---- copies ----


def test_an_engine_has_no_copies(tiny: Path) -> None:
    """A copy shared the memory of the first one, which closing the first one took away."""
    with dyno.Engine(tiny, profile=None) as engine:
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                PlanError, match=rf"{tiny} cannot be copied or pickled.*; open the file again"
            ):
                copies(engine)
        assert engine.logits([1, 2]).shape[0] == 2


def test_a_tokenizer_can_be_pickled(trained: dyno.Engine) -> None:
    for other in (pickle.loads(pickle.dumps(trained.tokenizer)), copy.deepcopy(trained.tokenizer)):
        assert other.encode("def main():") == trained.tokenize("def main():")
