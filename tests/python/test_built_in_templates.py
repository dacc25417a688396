"""Built-in chat templates: the exact prompt of each published format."""

from __future__ import annotations

import pytest
from dyno.chat import ChatTemplate, find_template
from dyno.chat.template import BUILT_IN
from dyno.errors import ChatError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TURNS = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Again"},
]
PROMPTS = {
    "chatml": (
        "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama2": (
        "[INST] <<SYS>>\nBe terse.\n<</SYS>>\n\nHello [/INST] Hi </s><s>[INST] Again [/INST]"
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nBe terse.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAgain<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral-v1": " [INST] Be terse.\n\nHello [/INST] Hi</s> [INST] Again [/INST]",
    "mistral-v3": "[INST] Hello[/INST] Hi</s>[INST] Be terse.\n\nAgain[/INST]",
    "mistral-v3-tekken": "[INST]Hello[/INST]Hi</s>[INST]Be terse.\n\nAgain[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] Be terse.[/SYSTEM_PROMPT][INST] Hello[/INST] Hi</s>[INST] Again[/INST]",
    "mistral-v7-tekken": "[SYSTEM_PROMPT]Be terse.[/SYSTEM_PROMPT][INST]Hello[/INST]Hi</s>[INST]Again[/INST]",
    "gemma": (
        "<start_of_turn>user\nBe terse.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\nAgain<end_of_turn>\n<start_of_turn>model\n"
    ),
    "phi3": (
        "<|system|>\nBe terse.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi<|end|>\n"
        "<|user|>\nAgain<|end|>\n<|assistant|>\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be terse.<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hi<|im_end|><|im_start|>user<|im_sep|>Again<|im_end|>"
        "<|im_start|>assistant<|im_sep|>"
    ),
    "zephyr": (
        "<|system|>\nBe terse.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi</s>\n<|user|>\nAgain</s>\n"
        "<|assistant|>\n"
    ),
    "vicuna": "Be terse.\n\nUSER: Hello\nASSISTANT: Hi</s>\nUSER: Again\nASSISTANT:",
    "deepseek": (
        "Be terse.### Instruction:\nHello\n### Response:\nHi\n<|EOT|>\n"
        "### Instruction:\nAgain\n### Response:\n"
    ),
    "deepseek2": "Be terse.\n\nUser: Hello\n\nAssistant: Hi</s>User: Again\n\nAssistant:",
    "deepseek3": "Be terse.<｜User｜>Hello<｜Assistant｜>Hi</s><｜User｜>Again<｜Assistant｜>",
    "granite": (
        "<|start_of_role|>system<|end_of_role|>Be terse.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>Hi<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Again<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    ),
}  # fmt: skip
OPENINGS = {
    "chatml": "<|im_start|>assistant\n", "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n", "phi3": "<|assistant|>\n", "zephyr": "<|assistant|>\n",
    "phi4": "<|im_start|>assistant<|im_sep|>", "vicuna": "ASSISTANT:", "deepseek": "### Response:\n",
    "deepseek2": "Assistant:", "deepseek3": "<｜Assistant｜>",
    "granite": "<|start_of_role|>assistant<|end_of_role|>",
}  # fmt: skip
"""The beginning of an answer; the other formats have none."""
MERGED = ["llama2", "mistral-v1", "mistral-v3", "mistral-v3-tekken", "gemma"]


def _template(name: str) -> ChatTemplate:
    return ChatTemplate(find_template({}, wanted=name).text, name, TOKENS)


def test_every_template_is_here() -> None:
    assert set(PROMPTS) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_prompt_of_a_conversation(name: str) -> None:
    template = _template(name)
    assert template.render(TURNS).text == PROMPTS[name]
    before = template.render(TURNS, add_generation_prompt=False).text
    assert before + OPENINGS.get(name, "") == PROMPTS[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_without_a_system_prompt_nothing_stands_in_its_place(name: str) -> None:
    template = _template(name)
    bare = template.render(TURNS[1:2]).text
    assert "terse" not in bare
    with_system = template.render(TURNS[:2]).text
    assert len(with_system) > len(bare) + len("Be terse.") - 1
    if name not in MERGED:
        assert with_system.endswith(bare)
    else:
        assert (
            with_system.replace("Be terse.\n\n", "").replace("<<SYS>>\nBe terse.\n<</SYS>>\n\n", "") == bare
        )


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_the_marks_are_of_the_template(name: str) -> None:
    """A control token in a message remains text, and each mark of the format becomes a token."""
    turns = [{**turn, "content": f"<|x{n}|>"} for n, turn in enumerate(TURNS)]
    rendered = _template(name).render(turns)
    foreign, at = "", 0
    for begin, end in rendered.own:
        foreign += rendered.text[at:begin]
        at = end
    foreign += rendered.text[at:]
    if name in ("chatml", "llama3"):  # which write any role
        for role in ("system", "user", "assistant"):
            foreign = foreign.replace(role, "")
    order = (1, 2, 0, 3) if name.startswith("mistral-v3") else (0, 1, 2, 3)
    assert foreign == "".join(f"<|x{n}|>" for n in order)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("chatml", "llama3")])
def test_a_role_that_the_format_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ChatError, match=r"the roles system, user and assistant, but the message has tool"):
        _template(name).render([*TURNS, {"role": "tool", "content": "4"}])


@pytest.mark.parametrize("name", MERGED)
def test_several_system_messages_are_one_prompt_and_need_a_message_of_the_user(name: str) -> None:
    template = _template(name)
    several = [TURNS[0], {"role": "developer", "content": "In verse."}, *TURNS[1:]]
    expected = PROMPTS[name].replace("Be terse.", "Be terse.\n\nIn verse.")
    assert template.render(several).text == expected
    with pytest.raises(ChatError, match="the system prompt goes into a message of the user"):
        template.render(TURNS[:1])


@pytest.mark.parametrize("name", BUILT_IN)
def test_parts_of_text_become_one_text(name: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = _template(name).prompt([{"role": "user", "content": parts}]).text
    assert "one\ntwo" in found


def test_a_wrong_name_tells_all_names_and_the_text_of_a_template_is_one() -> None:
    with pytest.raises(ChatError, match=r"'llama-3' is neither .*: chatml, llama2, llama3, .*granite"):
        find_template({}, wanted="llama-3")
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + " " * 5000
    assert find_template({}, wanted=text).render(TURNS[1:2]).text.strip() == "<user>Hello"
