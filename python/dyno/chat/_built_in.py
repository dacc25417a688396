"""Chat templates by name, for model files that have none.

Each one follows the published prompt format of its models. The names are the ones that llama.cpp takes. A
template leaves out the first BOS token, because `encode` adds it if the vocabulary wants one.
"""

from __future__ import annotations

__all__ = ["BUILT_IN"]

_ROLES = (
    "{{- raise_exception('it has the roles system, user and assistant, but the message has ' "
    "~ (message.role or 'none')) -}}"
)
"""Template code that refuses a role that the format does not have, such as `tool`."""


def _marked(system: str, user: str, assistant: str, opening: str) -> str:
    """The template of a format whose messages do not depend on each other, from one expression per role.

    Args:
        opening: The expression that opens the answer.
    """
    return (
        "{%- for message in messages -%}{%- set text = message.content or '' -%}"
        f"{{%- if message.role in ('system', 'developer') -%}}{{{{- {system} -}}}}"
        f"{{%- elif message.role == 'user' -%}}{{{{- {user} -}}}}"
        f"{{%- elif message.role == 'assistant' -%}}{{{{- {assistant} -}}}}"
        f"{{%- else -%}}{_ROLES}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- {opening} -}}}}{{%- endif -%}}"
    )


def _merged(user: str, assistant: str, opening: str = "''", *, last: bool = False) -> str:
    """The template of a format without a role `system`, where a message of the user contains the system
    prompt.

    Args:
        user: An expression that uses `text` and `system`. `system` is empty except in one message.
        last: Whether the last message of the user contains the system prompt, instead of the first one.
    """
    chosen = "" if last else "{%- if at.user < 0 -%}"
    return (
        "{%- set at = namespace(user=-1, system='') -%}"
        "{%- for message in messages -%}"
        "{%- if message.role in ('system', 'developer') -%}"
        "{%- set at.system = (at.system ~ '\\n\\n' if at.system else '') ~ (message.content or '') -%}"
        f"{{%- elif message.role == 'user' -%}}{chosen}{{%- set at.user = loop.index0 -%}}"
        f"{'' if last else '{%- endif -%}'}"
        f"{{%- elif message.role != 'assistant' -%}}{_ROLES}{{%- endif -%}}"
        "{%- endfor -%}"
        "{%- if at.system and at.user < 0 -%}"
        "{{- raise_exception('the system prompt goes into a message of the user,"
        " and there is no such message') -}}"
        "{%- endif -%}"
        "{%- for message in messages -%}{%- set text = message.content or '' -%}"
        "{%- set system = at.system if loop.index0 == at.user else '' -%}"
        f"{{%- if message.role == 'user' -%}}{{{{- {user} -}}}}"
        f"{{%- elif message.role == 'assistant' -%}}{{{{- {assistant} -}}}}{{%- endif -%}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {opening} -}}}}{{%- endif -%}}"
    )


_LED = "(system ~ '\\n\\n' if system else '') ~ text"
"""The text of the user after the system prompt and an empty line."""

BUILT_IN = {
    "chatml": (
        "{%- for message in messages -%}"
        "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
    ),
    "llama2": _merged(
        "(bos_token if loop.index0 > at.user else '') ~ '[INST] ' ~ "
        "('<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' if system else '') ~ text | trim ~ ' [/INST]'",
        "' ' ~ text | trim ~ ' ' ~ eos_token",
    ),
    "llama3": (
        "{%- for message in messages -%}"
        "{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' "
        "~ (message.content or '') | trim ~ '<|eot_id|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    ),
    "mistral-v1": _merged(f"' [INST] ' ~ {_LED} ~ ' [/INST]'", "' ' ~ text ~ eos_token"),
    "mistral-v3": _merged(f"'[INST] ' ~ {_LED} ~ '[/INST]'", "' ' ~ text | trim ~ eos_token", last=True),
    "mistral-v3-tekken": _merged(f"'[INST]' ~ {_LED} ~ '[/INST]'", "text ~ eos_token", last=True),
    "mistral-v7": _marked(
        "'[SYSTEM_PROMPT] ' ~ text ~ '[/SYSTEM_PROMPT]'",
        "'[INST] ' ~ text ~ '[/INST]'", "' ' ~ text ~ eos_token", "''",
    ),
    "mistral-v7-tekken": _marked(
        "'[SYSTEM_PROMPT]' ~ text ~ '[/SYSTEM_PROMPT]'",
        "'[INST]' ~ text ~ '[/INST]'", "text ~ eos_token", "''",
    ),
    "gemma": _merged(
        f"'<start_of_turn>user\\n' ~ ({_LED}) | trim ~ '<end_of_turn>\\n'",
        "'<start_of_turn>model\\n' ~ text | trim ~ '<end_of_turn>\\n'",
        "'<start_of_turn>model\\n'",
    ),
    "phi3": _marked(
        "'<|system|>\\n' ~ text ~ '<|end|>\\n'", "'<|user|>\\n' ~ text ~ '<|end|>\\n'",
        "'<|assistant|>\\n' ~ text ~ '<|end|>\\n'", "'<|assistant|>\\n'",
    ),
    "phi4": _marked(
        "'<|im_start|>system<|im_sep|>' ~ text ~ '<|im_end|>'",
        "'<|im_start|>user<|im_sep|>' ~ text ~ '<|im_end|>'",
        "'<|im_start|>assistant<|im_sep|>' ~ text ~ '<|im_end|>'",
        "'<|im_start|>assistant<|im_sep|>'",
    ),
    "zephyr": _marked(
        "'<|system|>\\n' ~ text ~ eos_token ~ '\\n'", "'<|user|>\\n' ~ text ~ eos_token ~ '\\n'",
        "'<|assistant|>\\n' ~ text ~ eos_token ~ '\\n'", "'<|assistant|>\\n'",
    ),
    "vicuna": _marked(
        "text ~ '\\n\\n'", "'USER: ' ~ text ~ '\\n'", "'ASSISTANT: ' ~ text ~ eos_token ~ '\\n'",
        "'ASSISTANT:'",
    ),
    "deepseek": _marked(
        "text", "'### Instruction:\\n' ~ text ~ '\\n'", "'### Response:\\n' ~ text ~ '\\n<|EOT|>\\n'",
        "'### Response:\\n'",
    ),
    "deepseek2": _marked(
        "text ~ '\\n\\n'", "'User: ' ~ text ~ '\\n\\n'", "'Assistant: ' ~ text ~ eos_token", "'Assistant:'"
    ),
    "deepseek3": _marked(
        "text", "'<｜User｜>' ~ text", "'<｜Assistant｜>' ~ text ~ eos_token", "'<｜Assistant｜>'"
    ),
    "granite": _marked(
        "'<|start_of_role|>system<|end_of_role|>' ~ text ~ '<|end_of_text|>\\n'",
        "'<|start_of_role|>user<|end_of_role|>' ~ text ~ '<|end_of_text|>\\n'",
        "'<|start_of_role|>assistant<|end_of_role|>' ~ text ~ '<|end_of_text|>\\n'",
        "'<|start_of_role|>assistant<|end_of_role|>'",
    ),
}  # fmt: skip
"""Jinja2 templates by the name that `--chat-template` takes."""
