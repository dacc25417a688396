"""A table of flags of llama.cpp, ik_llama.cpp and vLLM that users type by habit, with an answer to each.

`Command` reads the words of a command line before typer does. Flags that change results or that dyno lacks
end the command with exit code 2; one error answers all of them. For a flag that dyno does not need, it prints
a warning and goes on. A switch has one answer for on and one for off. Values that mean the default in
llama.cpp, such as `-t -1`, also mean the default in dyno.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import typer

from dyno._cli import help

_log = logging.getLogger("dyno.cli")


class Verdict(StrEnum):
    """The kind of answer to a flag."""

    HERE = "in dyno, use"
    UNNECESSARY = "not needed in dyno"
    MISSING = "not supported by dyno"


class Takes(StrEnum):
    """The number and kind of words after a flag that belong to it."""

    NOTHING = "nothing"
    VALUE = "value"
    SWITCH = "switch"
    """An optional word for on or off, or a list of such words."""


@dataclass(frozen=True)
class Foreign:
    """A foreign flag: its names, its verdict and the reason. For `HERE`, the reason is the option of dyno."""

    names: tuple[str, ...]
    takes: Takes
    verdict: Verdict
    why: str
    off: tuple[Verdict, str] | None = None
    """Verdict and reason for a switch that is turned off."""

    @property
    def answer(self) -> str:
        return _answer(self.verdict, self.why)

    def judged(self, words: str) -> tuple[Verdict, str]:
        """Verdict and answer for the words after the flag, which can be a list with commas.

        A list of on and off, as in llama-bench, needs two runs in dyno.
        """
        off = [word.lower() in _OFF_WORDS for word in words.split(",")]
        if self.off is None or not any(off):
            return self.verdict, self.answer
        if all(off):
            return self.off[0], _answer(*self.off)
        return Verdict.HERE, f"one run takes one value. On: {self.answer}. Off: {_answer(*self.off)}"


def _answer(verdict: Verdict, why: str) -> str:
    return f"{verdict}{' ' if verdict is Verdict.HERE else ': '}{why}"


_OFF_WORDS = frozenset({"off", "0", "false", "disabled"})
_SWITCH_WORDS = _OFF_WORDS | {"on", "1", "true", "enabled", "auto", "-1"}
_NUMBERS = frozenset({"-n", "-c", "-t", "-s", "-d", "-r", "-b"})  # short options whose value is never a word

# By parameter: values that mean the default in llama.cpp, so dyno drops the option.
_DEFAULTS = {
    "threads": frozenset({"-1"}),
    "threads_batch": frozenset({"-1"}),
    "seed": frozenset({"-1", "4294967295"}),
    "n_gpu_layers": frozenset({"auto", "-1"}),
}
_HERE, _NOT_NEEDED, _MISSING = Verdict.HERE, Verdict.UNNECESSARY, Verdict.MISSING
_NO, _VALUE, _SWITCH = Takes.NOTHING, Takes.VALUE, Takes.SWITCH
_CHAT = "the chat template defines the text around a message"
_SAMPLER = "dyno has the samplers of --help, in a fixed order"

# By the first name of a switch: the verdict if the next word turns it off.
_TURNED_OFF: dict[str, tuple[Verdict, str]] = {
    "-co": (_NOT_NEEDED, "the output has no colours"),
    "--log-colors": (_NOT_NEEDED, "messages are plain lines"),
    "-nkvo": (_NOT_NEEDED, "the KV cache of a layer is on the device of its attention"),
    "--fit": (_HERE, "-ngl all, which fails if the model does not fit"),
    "-fa": (_HERE, "--set flash_attention=off, on a GPU"),
    "-fmoe": (_MISSING, "the products of experts are always fused"),
    "-rtr": (_HERE, "--set cpu_repack=off"),
    "-mmp": (_HERE, "--set mmap=off"),
    "-nopo": (
        _NOT_NEEDED,
        "for large u-batches, weights in host memory are streamed to the GPU automatically",
    ),
}

FLAGS: tuple[Foreign, ...] = tuple(
    Foreign(tuple(names.split()), takes, verdict, why, _TURNED_OFF.get(names.split()[0]))
    for names, takes, verdict, why in (
        # placement
        (
            "-nkvo --no-kv-offload",
            _SWITCH,
            _MISSING,
            "the KV cache of a layer is on the device of its attention; -ot moves both",
        ),
        ("-mg --main-gpu", _VALUE, _HERE, "--gpu N"),
        ("-dev", _VALUE, _HERE, "--device cuda:N"),
        (
            "--fit -fit",
            _SWITCH,
            _NOT_NEEDED,
            "dyno chooses a placement itself if the model does not fit; -ngl all makes it fail instead",
        ),
        ("--list-devices", _NO, _HERE, "dyno info"),
        # speed
        (
            "-fa --flash-attn",
            _SWITCH,
            _NOT_NEEDED,
            "flash attention is on by default; --set flash_attention=off turns it off on a GPU",
        ),
        ("-fmoe --fused-moe", _SWITCH, _NOT_NEEDED, "the products of experts are fused by default"),
        ("-rtr --run-time-repack --repack", _SWITCH, _NOT_NEEDED, "weights are repacked by default"),
        (
            "-ser --smart-expert-reduction",
            _VALUE,
            _MISSING,
            "the router chooses as many experts as the model asks for",
        ),
        (
            "-amb --attention-max-batch",
            _VALUE,
            _NOT_NEEDED,
            "the plan includes the memory of attention, and --vram SIZE limits it",
        ),
        ("-ger --grouped-expert-routing", _NO, _NOT_NEEDED, "experts are routed as the model file asks for"),
        ("-gr --graph-reuse", _NO, _NOT_NEEDED, "graphs are reused by default"),
        ("-dt --defrag-thold", _VALUE, _NOT_NEEDED, "the KV cache needs no defragmentation"),
        ("--swa-full", _NO, _HERE, "--set window_cache=full"),
        ("-nr --no-repack", _NO, _HERE, "--set cpu_repack=off"),
        ("-mla --mla-use", _VALUE, _HERE, "--set mla_mode=NAME"),
        (
            "-cb --cont-batching",
            _NO,
            _NOT_NEEDED,
            "dyno serve always uses continuous batching, and other commands run one sequence",
        ),
        ("-nocb --no-cont-batching", _NO, _HERE, "--set sequences=1"),
        (
            "-np --parallel",
            _VALUE,
            _NOT_NEEDED,
            "the command runs one sequence; --set sequences=N reserves more",
        ),
        ("-b --batch-size", _VALUE, _NOT_NEEDED, "a prompt is processed in passes of --ubatch tokens"),
        (
            "-mmp --mmap",
            _SWITCH,
            _NOT_NEEDED,
            "the file is mapped by default; --set mmap=off reads it instead",
        ),
        ("--no-mmap", _NO, _HERE, "--set mmap=off"),
        ("--mlock", _NO, _MISSING, "the mapped file is not locked in memory"),
        ("-C --cpu-mask", _VALUE, _MISSING, "run the command under taskset"),
        ("-Cr --cpu-range", _VALUE, _MISSING, "run the command under taskset"),
        ("--prio", _VALUE, _MISSING, "run the command under nice"),
        ("--poll", _VALUE, _NOT_NEEDED, "the engine chooses how its threads wait"),
        ("-kvu --kv-unified", _NO, _HERE, "--set cache_tokens=N, which all sequences share"),
        ("-nopo --no-op-offload", _SWITCH, _HERE, "--set offload_min_tokens=N with a large N"),
        ("-lm --load-mode", _VALUE, _HERE, "--set mmap=on or off"),
        ("--rpc -rpc", _VALUE, _MISSING, "a model runs on one machine"),
        ("--no-perf --perf", _NO, _NOT_NEEDED, "-v prints timings"),
        ("--no-warmup", _NO, _NOT_NEEDED, "the command does not warm up"),
        # llama-bench and llama-perplexity
        ("--delay", _VALUE, _MISSING, "put sleep between two runs"),
        ("--progress", _NO, _NOT_NEEDED, "a terminal always shows the progress"),
        ("-oe --output-err", _VALUE, _HERE, "-o FORMAT, and 2> FILE of the shell for messages"),
        (
            "--hellaswag --winogrande --multiple-choice",
            _NO,
            _MISSING,
            "lm-eval measures such tasks with dyno serve (docs/user/serving-api.md)",
        ),
        # chat
        ("-cnv --conversation", _NO, _HERE, "dyno chat, or --chat for one answer"),
        ("-no-cnv --no-conversation", _NO, _NOT_NEEDED, "without --chat, the prompt is raw text"),
        ("-sysf --system-prompt-file", _VALUE, _HERE, '--system "$(cat FILE)"'),
        ("-i --interactive", _NO, _HERE, "dyno chat"),
        ("-if --interactive-first", _NO, _HERE, "dyno chat"),
        ("-st --single-turn", _NO, _HERE, "--chat"),
        ("--jinja", _NO, _NOT_NEEDED, "chat templates are always rendered as Jinja2"),
        ("--no-jinja", _NO, _MISSING, "chat templates are always rendered as Jinja2"),
        (
            "--reasoning-budget",
            _VALUE,
            _MISSING,
            "many templates turn reasoning off with --chat-template-kwargs '{\"enable_thinking\": false}'",
        ),
        ("--reasoning-format", _VALUE, _NOT_NEEDED, "reasoning is always separate from the answer"),
        ("--chat-template-file", _VALUE, _HERE, "--chat-template FILE"),
        ("--in-prefix", _VALUE, _MISSING, _CHAT),
        ("--in-suffix", _VALUE, _MISSING, _CHAT),
        # text
        ("--predict", _VALUE, _HERE, "--max-tokens N"),
        ("-r --reverse-prompt", _VALUE, _HERE, "--stop TEXT"),
        ("--no-display-prompt", _NO, _HERE, "--no-echo"),
        ("-e --escape", _NO, _MISSING, "let the shell write a line break: $'a\\nb'"),
        ("--no-escape", _NO, _NOT_NEEDED, "the prompt is used as it is"),
        ("--mirostat", _VALUE, _MISSING, _SAMPLER),
        ("--samplers", _VALUE, _MISSING, _SAMPLER),
        (
            "--sampling-seq --sampler-seq --dynatemp-range --dynatemp-exp --mirostat-lr --mirostat-ent "
            "--top-nsigma --top-n-sigma",
            _VALUE,
            _MISSING,
            _SAMPLER,
        ),
        ("--keep", _VALUE, _NOT_NEEDED, "the context is never shifted"),
        ("--no-context-shift", _NO, _NOT_NEEDED, "the context is never shifted"),
        (
            "--prompt-cache",
            _VALUE,
            _MISSING,
            "the KV cache is not saved to files; dyno serve keeps prefixes in memory",
        ),
        ("-sp", _NO, _MISSING, "control tokens are not printed"),
        (
            "--verbose-prompt",
            _NO,
            _MISSING,
            "prompts are not printed as tokens; /tokenize of dyno serve returns them",
        ),
        ("--context-shift", _NO, _MISSING, "generation stops at the end of the context"),
        # model
        (
            "-hf -hfr --hf-repo -hff --hf-file -hft --hf-token",
            _VALUE,
            _MISSING,
            "dyno downloads no models; download the file first",
        ),
        ("-mu --model-url", _VALUE, _MISSING, "dyno downloads no models; download the file first"),
        ("-md --model-draft", _VALUE, _MISSING, "only dyno serve takes a draft model"),
        ("--override-kv", _VALUE, _MISSING, "metadata is always read from the file"),
        ("--no-mmproj", _NO, _NOT_NEEDED, "dyno takes text only"),
        ("--lora", _VALUE, _MISSING, "adapters are not loaded; merge them into the model file"),
        ("-mm --mmproj", _VALUE, _MISSING, "dyno takes text only"),
        ("--rope-scaling", _VALUE, _MISSING, "RoPE parameters are always read from the file"),
        ("--rope-freq-base", _VALUE, _MISSING, "RoPE parameters are always read from the file"),
        ("--rope-freq-scale", _VALUE, _MISSING, "RoPE parameters are always read from the file"),
        (
            "--rope-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow "
            "--yarn-beta-fast",
            _VALUE,
            _MISSING,
            "RoPE parameters are always read from the file",
        ),
        (
            "--lora-scaled --control-vector",
            _VALUE,
            _MISSING,
            "adapters are not loaded; merge them into the model file",
        ),
        # the server
        ("--host", _VALUE, _HERE, "dyno serve"),
        ("--port", _VALUE, _HERE, "dyno serve"),
        ("--api-key", _VALUE, _HERE, "dyno serve"),
        ("--embedding --embeddings", _NO, _NOT_NEEDED, "dyno serve always answers /v1/embeddings"),
        ("--metrics", _NO, _NOT_NEEDED, "dyno serve always answers /metrics"),
        ("--slots", _NO, _NOT_NEEDED, "/metrics of dyno serve counts running and waiting requests"),
        ("--no-slots", _NO, _NOT_NEEDED, "the server does not expose single requests"),
        ("--props", _NO, _NOT_NEEDED, "the settings of a server are fixed at the start; /props shows them"),
        ("--cache-reuse", _VALUE, _NOT_NEEDED, "a prompt always reuses the longest cached prefix"),
        ("--cache-prompt", _NO, _NOT_NEEDED, "prompts always reuse cached prefixes"),
        ("--threads-http", _VALUE, _NOT_NEEDED, "the server needs no HTTP threads"),
        ("--no-webui --no-ui", _NO, _MISSING, "the page at / cannot be switched off"),
        ("--api-key-file", _VALUE, _HERE, 'DYNO_API_KEY="$(cat FILE)" in the environment'),
        ("--pooling", _VALUE, _MISSING, "the model file or the field `pooling` of a request sets it"),
        ("--slot-save-path", _VALUE, _MISSING, "the KV cache is not saved to files"),
        (
            "--ssl-key-file --ssl-cert-file --ssl-keyfile --ssl-certfile",
            _VALUE,
            _MISSING,
            "the server speaks plain HTTP; put a TLS proxy in front of it",
        ),
        # the server of vLLM
        ("--max-model-len", _VALUE, _HERE, "--ctx N"),
        ("--max-num-seqs", _VALUE, _HERE, "--sequences N"),
        ("--max-num-batched-tokens", _VALUE, _HERE, "--step-tokens N"),
        ("--served-model-name", _VALUE, _HERE, "--alias NAME"),
        ("--gpu-memory-utilization", _VALUE, _HERE, "--vram SIZE"),
        ("--kv-cache-dtype", _VALUE, _HERE, "--cache-type-k TYPE and --cache-type-v TYPE"),
        ("--allowed-origins", _VALUE, _HERE, "--cors-origin ORIGIN"),
        ("--enforce-eager", _NO, _HERE, "--set cuda_graphs=off"),
        (
            "--tensor-parallel-size -tp",
            _VALUE,
            _MISSING,
            "a layer runs on one GPU; --split-mode layer distributes layers, and --ray N serves replicas",
        ),
        ("--dtype", _VALUE, _MISSING, "weights keep the types of the file"),
        ("--enable-prefix-caching", _NO, _NOT_NEEDED, "prompts always reuse cached prefixes"),
        ("--enable-auto-tool-choice", _NO, _NOT_NEEDED, "the chat template determines the format of calls"),
        ("--tool-call-parser", _VALUE, _NOT_NEEDED, "the chat template determines the format of calls"),
        ("--reasoning-parser", _VALUE, _NOT_NEEDED, "reasoning is always separate from the answer"),
        ("--trust-remote-code", _NO, _NOT_NEEDED, "a model file contains no code"),
        ("--disable-log-requests", _NO, _NOT_NEEDED, "requests are logged only with -v"),
        # the terminal
        ("-co --color", _SWITCH, _NOT_NEEDED, "the output has no colours"),
        ("--simple-io", _NO, _NOT_NEEDED, "the output is plain text"),
        ("--log-disable", _NO, _NOT_NEEDED, "standard output gets only the generated text"),
        (
            "-lv --verbosity --log-verbosity",
            _VALUE,
            _NOT_NEEDED,
            "warnings are always shown, and -v shows more",
        ),
        ("--log-file", _VALUE, _HERE, "2> FILE of the shell"),
        ("--log-prefix --log-timestamps", _NO, _NOT_NEEDED, "messages are plain lines"),
        ("--log-colors", _SWITCH, _NOT_NEEDED, "messages are plain lines"),
        ("-mli --multiline-input", _NO, _HERE, "dyno chat, where Alt-Enter begins a new line"),
        ("--offline", _NO, _NOT_NEEDED, "dyno never downloads"),
        ("--kl-divergence-base", _VALUE, _HERE, "--reference FILE, or --save-reference FILE"),
        ("--save-all-logits", _VALUE, _HERE, "--save-reference FILE"),
        ("--kl-divergence", _NO, _HERE, "--reference FILE"),
    )
)
_BY_NAME = {name: flag for flag in FLAGS for name in flag.names}

# By field of a request: the options of llama-server and of dyno run for it.
_FIELDS = {
    "temperature": "--temp --temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "typical_p": "--typical --typical-p",
    "seed": "-s --seed",
    "max_tokens": "-n --predict --n-predict --max-tokens",
    "stop": "-r --reverse-prompt --stop",
    "repeat_penalty": "--repeat-penalty",
    "repeat_last_n": "--repeat-last-n",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "ignore_eos": "--ignore-eos",
    "logit_bias": "-l --logit-bias",
    "grammar": "--grammar --grammar-file",
    "response_format": "-j --json-schema -jf --json-schema-file",
}
_CHATS = "dyno chat is a conversation, and Alt-Enter begins a new line"
_MODES = "-cnv --conversation -i --interactive -if --interactive-first -mli --multiline-input"

# By command: flags with another answer than elsewhere, and options of other commands.
_OF_COMMAND: dict[str, dict[str, tuple[Verdict, str]]] = {
    "bench": {"--json": (_HERE, "-o json")},
    "chat": {
        **dict.fromkeys(_MODES.split(), (_NOT_NEEDED, _CHATS)),
        **dict.fromkeys(("-st", "--single-turn"), (_HERE, "dyno run --chat -p TEXT")),
        **dict.fromkeys(("-no-cnv", "--no-conversation"), (_HERE, "dyno run -p TEXT")),
        **dict.fromkeys(("-p", "--prompt"), (_HERE, "dyno run --chat -p TEXT for one answer")),
        **dict.fromkeys(("-f", "--file"), (_HERE, "dyno run --chat -f FILE for one answer")),
        "--ignore-eos": (_HERE, "dyno run --ignore-eos"),
    },
    "experts": dict.fromkeys(("-f", "--file"), (_HERE, "--text FILE")),
    "serve": {
        "-p": (_HERE, "--port N, or dyno run for a prompt"),
        "--prompt": (_HERE, "dyno run -p TEXT"),
        "-to": (_HERE, "--timeout SECONDS"),
        **{
            name: (_HERE, f"the field {field} of a request")
            for field, names in _FIELDS.items()
            for name in names.split()
        },
    },
}


# By command: the advice about a word after the model.
_EXTRA = {
    "run": "give the prompt after -p, in quotes",
    "chat": "type messages into the chat, or give one to dyno run --chat -p TEXT",
    "serve": "the port follows --port",
    "bench": "one run measures one model",
}


class Command(help.Command):
    """A command that answers foreign flags by name. Its first bare word is the model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            answers = _OF_COMMAND.get(str(ctx.info_name), {})
            return super().parse_args(ctx, _without_foreign(self.params, args, answers))
        except help.USAGE_ERROR as error:
            if "unexpected extra argument" in error.message and ctx.info_name in _EXTRA:
                error.message += f"; {_EXTRA[ctx.info_name]}"
            raise


def _without_foreign(
    params: list[Any], args: list[str], answers: dict[str, tuple[Verdict, str]]
) -> list[str]:
    """`args` without the flags that dyno does not need.

    Args:
        params: The options of the command.
        args: The words after its name.
        answers: Verdicts and reasons of this command alone, by flag.

    Raises:
        typer.BadParameter: A flag that changes results, that dyno lacks, or that is unknown.
    """
    own = {name: p for p in params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    kept: list[str] = []
    refused: list[tuple[str, str]] = []
    models: list[str] = []
    at = 0
    while at < len(args):
        word = args[at]
        at += 1
        name, equals, value = word.partition("=")
        if word == "--":
            kept += [word, *args[at:]]
            break
        if name in own:
            words = [word]
            bare = getattr(own[name], "is_flag", False) or getattr(own[name], "count", False)
            if not bare and not equals and at < len(args):
                value = args[at]
                words.append(value)
                at += 1
            if value not in _DEFAULTS.get(own[name].name, ()):
                kept += words
            if own[name].name == "model":
                models.append(value)
        elif name in answers:
            verdict, answer = answers[name][0], _answer(*answers[name])
            if verdict is Verdict.UNNECESSARY:
                _log.warning("%s is %s", word, answer)
            else:  # its value may be left, because the command ends
                refused.append((name, answer))
        elif (flag := _BY_NAME.get(name)) is not None:
            following = args[at] if at < len(args) and not equals else None
            takes_it = flag.takes is Takes.VALUE or (flag.takes is Takes.SWITCH and _is_switch(following))
            if takes_it and following is not None:
                at += 1
                word, value = f"{word} {following}", following
            verdict, answer = flag.judged(value)
            if verdict is not Verdict.UNNECESSARY:
                refused.append((word, answer))
            else:
                _log.warning("%s is %s", word, answer)
        else:
            _refuse_cluster(word, own)
            kept.append(word)
    if len(models) > 1:
        raise typer.BadParameter(
            f"{len(models)} models were given, {', '.join(models)}; one run takes one", param_hint="--model"
        )
    if len(refused) == 1:
        raise typer.BadParameter(refused[0][1], param_hint=refused[0][0])
    if refused:
        lines = "".join(f"\n  {word}: {answer}" for word, answer in refused)
        raise typer.BadParameter(f"{len(refused)} flags are not options of dyno:{lines}")
    return kept


def _is_switch(word: str | None) -> bool:
    return word is not None and all(part.lower() in _SWITCH_WORDS for part in word.split(","))


def _refuse_cluster(word: str, own: dict[str, Any]) -> None:
    """Refuse a cluster of short options such as `-nothing` or `-sys`. Otherwise the message would name only
    `-n` or `-s`."""
    unreadable = word[:2] in _NUMBERS or word[:2] not in own
    if unreadable and re.fullmatch(r"-[A-Za-z][A-Za-z][\w-]*", word):
        raise typer.BadParameter("no such option", param_hint=word)
