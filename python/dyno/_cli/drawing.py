"""Options for sampling and for conversations, shared by `dyno run` and `dyno chat`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dyno._cli import options
from dyno._cli.groups import Group
from dyno.errors import PlanError

# Titles of sections of --help.
DRAWS = "Sampling"
RULES = "JSON and grammars"
CHAT = "Chat"

TopK = Annotated[int, typer.Option(help="Sample from the N most probable tokens. 0 or -1: from all tokens.")]
TopP = Annotated[
    float,
    typer.Option(help="Sample from the most probable tokens whose probabilities add up to X. 1: off."),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Sample from the tokens that are at least X times as probable as the most probable one. 0: off."
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", "-s", help="Random seed; the same seed gives the same text.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop generating when this text appears. Can be repeated."),
]
TypicalP = Annotated[
    float | None,
    typer.Option(
        "--typical-p", "--typical", help="Locally typical sampling with this probability mass. 1: off."
    ),
]
XtcProbability = Annotated[
    float | None, typer.Option(help="Probability that XTC excludes the most probable tokens. 0: off.")
]
XtcThreshold = Annotated[
    float | None,
    typer.Option(help="XTC excludes tokens of at least this probability, except the least probable of them."),
]
RepeatPenalty = Annotated[float | None, typer.Option(help="Penalty for recent tokens. 1: off.")]
RepeatLastN = Annotated[
    int | None,
    typer.Option(help="Number of recent tokens that --repeat-penalty and DRY consider. -1: all."),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Penalty for tokens that already occur in the answer. 0: off.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Penalty for each earlier occurrence of a token in the answer. 0: off.")
]
DryMultiplier = Annotated[
    float | None, typer.Option(help="Strength of the DRY penalty for repeated sequences. 0: off.")
]
DryBase = Annotated[
    float | None,
    typer.Option(help="Base of the DRY penalty, which grows by this factor with each repeated token."),
]
DryAllowedLength = Annotated[
    int | None, typer.Option(help="Longest sequence in tokens that may repeat without a DRY penalty.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        "-l",
        metavar="TOKEN+VALUE",
        help="Add a value to the logit of a token id, such as 15043-1.5. Can be repeated.",
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        "-j",
        metavar="JSON",
        rich_help_panel=RULES,
        help="Constrain the output to JSON that matches this schema. {}: any JSON.",
    ),
]
JsonSchemaFile = Annotated[
    Path | None,
    typer.Option(
        "--json-schema-file", "-jf", rich_help_panel=RULES, help="Read the JSON schema from a file."
    ),
]
GrammarText = Annotated[
    str | None,
    typer.Option("--grammar", rich_help_panel=RULES, help="Constrain the output by a GBNF or Lark grammar."),
]
GrammarFile = Annotated[
    Path | None, typer.Option(rich_help_panel=RULES, help="Read the grammar from a file.")
]
ChatTemplateName = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE|NAME",
        rich_help_panel=CHAT,
        help="Chat template to use instead of the one in the model file: a Jinja2 file, or a name such as "
        "chatml, llama3, mistral-v7 or gemma. A wrong name prints all names.",
    ),
]
TemplateVariables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        rich_help_panel=CHAT,
        help='Variables of the chat template, such as {"enable_thinking": false}.',
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=CHAT,
        help="File with a JSON list of functions that the model may call. A call is printed as a line of "
        "JSON.",
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        "--system-prompt",
        "-sys",
        rich_help_panel=CHAT,
        help="System message of the conversation.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Group):
    """The sampling options except the temperature, whose default differs between commands."""

    section = DRAWS

    top_k: TopK = 40
    top_p: TopP = 0.95
    min_p: MinP = 0.05
    seed: Seed = None
    typical_p: TypicalP = None
    xtc_probability: XtcProbability = None
    xtc_threshold: XtcThreshold = None
    repeat_penalty: RepeatPenalty = None
    repeat_last_n: RepeatLastN = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    dry_multiplier: DryMultiplier = None
    dry_base: DryBase = None
    dry_allowed_length: DryAllowedLength = None
    logit_bias: LogitBias = None
    stop: Stop = None

    def settings(self, temperature: float) -> dict[str, Any]:
        """The sampling settings for `Engine.generate`, without options that were not given.

        Raises:
            typer.BadParameter: A bias cannot be read, or a value is out of range.
        """
        from dyno._sampling import BOUNDS

        given = {name: value for name, value in asdict(self).items() if value is not None}
        given.pop("stop", None)
        if biases := given.pop("logit_bias", None):
            given["logit_bias"] = dict(map(_bias, biases))
        settings = {"temperature": temperature, **given}
        for name, bound in BOUNDS.items():
            if name in settings and not bound.holds(settings[name]):
                raise typer.BadParameter(
                    f"{settings[name]} is not valid; the value must be {bound.words}",
                    param_hint=f"--{name.replace('_', '-')}",
                )
        return settings


def rules(
    json_schema: str | None, json_schema_file: Path | None, grammar: str | None, grammar_file: Path | None
) -> dict[str, str]:
    """The JSON schema or grammar that the text must follow, as sampling settings.

    Raises:
        typer.BadParameter: More than one is given, or it is invalid.
        NotInstalledError: The package llguidance is not installed.
    """
    given = {
        "--json-schema": json_schema,
        "--json-schema-file": json_schema_file,
        "--grammar": grammar,
        "--grammar-file": grammar_file,
    }
    found = [(name, value) for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise typer.BadParameter(f"contradicts {found[1][0]}; give one of them", param_hint=found[0][0])
    if not found:
        return {}
    from dyno._grammar import check_rules

    [(name, value)] = found
    kind = "json_schema" if "json" in name else "grammar"
    text = value if isinstance(value, str) else options.text_of(value)
    try:
        check_rules(kind, text)
    except PlanError as error:
        why = str(error).removeprefix("[grammar] ")
        if isinstance(value, str) and (os.path.isfile(value) or value.endswith((".json", ".gbnf", ".lark"))):
            why += f"; for the content of a file, give {name}-file"
        raise typer.BadParameter(why, param_hint=name) from error
    return {kind: text}


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d+)([+-](?:inf|\d+(?:\.\d*)?))", text)
    if found:
        return int(found[1]), float(found[2])
    raise typer.BadParameter(
        f"{text!r} is not TOKEN+VALUE or TOKEN-VALUE, such as 15043+1.5", param_hint="--logit-bias"
    )


def template_variables(text: str | None) -> dict[str, Any]:
    """The value of `--chat-template-kwargs` as a dict.

    Raises:
        typer.BadParameter: The value is not a JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not JSON: {error}", param_hint="--chat-template-kwargs"
        ) from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--chat-template-kwargs")
    return value


def tool_definitions(file: Path | None) -> list[dict[str, Any]] | None:
    """The functions in `file`, in the form of the chat API.

    Raises:
        typer.BadParameter: The file does not hold a JSON list of objects.
        OSError: The file cannot be read.
    """
    if file is None:
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}", param_hint="--tools") from error
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise typer.BadParameter(f"{file} is not a JSON list of objects", param_hint="--tools")
    return value
