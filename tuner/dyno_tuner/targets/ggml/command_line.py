"""A parser for a user's command line of llama.cpp or ik_llama.cpp. It sorts flags into knobs, flags for
llama-bench, flags for the server only, and flags that prevent a measurement."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.errors import TuneError
from .spelling import CUDA_KEYS, MLA, from_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.protocol import Value
    from .help import Help

# The first name of each flag; the help of the binary gives the aliases.
_KNOBS = {
    "-ub": "ubatch", "-t": "threads", "-tb": "threads_batch",
    "-fa": "flash_attention", "-amb": "attention_max_batch_mib", "-mla": "mla_mode",
    "-fmoe": "fused_moe", "-no-fmoe": "fused_moe", "-rtr": "cpu_repack", "--repack": "cpu_repack",
    "-no-fa": "flash_attention",
}  # fmt: skip
_MLA = {flag: name for name, flag in MLA.items()}
_CUDA_KEYS = {key: name for name, key in CUDA_KEYS.items()}
_CACHE = {"-ctk": "kv_type_k", "-ctv": "kv_type_v"}
# Names that share a row of the help with their opposite. The opposite has no effect.
_OPPOSITES = {
    "-kvo": "-nkvo", "--kv-offload": "-nkvo", "--mmap": "--no-mmap", "--op-offload": "--no-op-offload",
}  # fmt: skip
# The flags of `_OF_TEXT`, `_OF_REQUESTS` and `_OF_THE_SERVER` do not change the speed of one sequence.
# Text, sampling and the form of the answer.
_OF_TEXT = (
    "-n -p -f -s --seed --keep -e --escape --samplers --sampling-seq --sampler-seq --ignore-eos --temp "
    "--top-k --top-p --min-p --tfs --typical --top-n-sigma --top-nsigma --xtc-probability --xtc-threshold "
    "--repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --penalize-nl "
    "--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker "
    "--adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr "
    "--mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema --json-schema-file --jinja "
    "--no-jinja --chat-template --chat-template-file --chat-template-kwargs --reasoning "
    "--reasoning-format --reasoning-budget --reasoning-budget-message --reasoning-tokens "
    "--reasoning-effort --reasoning-preserve --skip-chat-parsing --prefill-assistant "
    "--no-prefill-assistant --parallel-tool-calls --special --spm-infill --system-prompt-file --no-escape"
)
# Requests and the state kept between them.
_OF_REQUESTS = (
    "-c -np -cb -nocb -kvu --kv-unified-per-slot --cache-ram -cram-n-min -crs --cache-reuse "
    "--cache-prompt --cache-idle-slots --ctx-checkpoints --swa-checkpoints -ctx-ckpt -ctx-ckpt-i "
    "-ctx-ckpt-t -ctx-ckpt-e --checkpoint-min-step --context-shift --no-context-shift "
    "--slot-prompt-similarity --slot-save-path --slots --no-slots --props --metrics -dt"
)
# Flags of requests that change the speed of a server, whose load decides the length of the context.
_OF_LOADS = frozenset(_OF_REQUESTS.split()) - {"-c", "-np", "-kvu", "--slot-save-path", "-dt"}
_DRAFTS = {"none": "off", "ngram-simple": "ngram"}
# The server and its logs.
_OF_THE_SERVER = (
    "--host --port --reuse-port --path --api-prefix --cors-origins --cors-methods --cors-headers "
    "--cors-credentials --ui --webui --no-webui --ui-config --ui-config-file --ui-mcp-proxy --tools "
    "--tools-runtime --mcp-servers-config --mcp-servers-json --agent --api-key --api-key-file "
    "--ssl-key-file --ssl-cert-file -to --timeout --sse-ping-interval --threads-http --media-path --alias "
    "-a --tags --sleep-idle-seconds --send-done --sql-save-file --simple-io -v --verbose --verbosity "
    "--verbose-prompt --minilog --log-disable --log-enable --log-file --log-new --log-append --logdir "
    "--log-format --log-jsonl --log-colors --log-prefix --log-timestamps --log-prompts-dir --perf"
)
# Loading.
_OF_LOADING = "-m --mlock --warmup --no-warmup --check-tensors --validate-quants --offline"
_SERVING = frozenset(" ".join((_OF_TEXT, _OF_REQUESTS, _OF_THE_SERVER, _OF_LOADING)).split())
# The engine's automatic placement and its parameters.
_FIT, _FITTED = frozenset({"-fit", "--fit"}), frozenset({"-fitt", "-fitc", "--fit-margin", "-gfm"})
_MODELS = frozenset({"--hf-repo", "-hfr", "--hf-file", "-hff", "--model-url", "--docker-repo"})
# Names that mean something else in llama-bench, or that each run sets itself.
_OWN = frozenset({
    "-r", "-o", "-oe", "-d", "-pg", "-gp", "-w", "--progress", "--delay", "-embd", "--embeddings",
    "--embedding", "--hf-token", "--list-devices", "--version", "-h", "--help",
})  # fmt: skip
# Flags whose value may hold commas: for other flags, llama-bench takes them as separators of tests.
_LISTS = frozenset({"-ot", "-ser", "--rpc"})
# The help of ik_llama.cpp omits the argument of these flags.
_UNTOLD = frozenset({
    "-mla", "-amb", "-cuda", "-ser", "-grt", "-gap", "-dsatk", "-draft", "-mea", "--adaptive-target",
    "--adaptive-decay", "--reasoning-budget-message",
})  # fmt: skip
_BARE = frozenset({"--defer-experts"})  # all other switches take a value in llama-bench


@dataclass
class Command:
    """A parsed command line."""

    env: dict[str, str] = field(default_factory=dict)
    incumbent: dict[str, Value] = field(default_factory=dict)  # settings that the search can change
    # Placement and cache, from which the search starts.
    base: dict[str, Value] = field(default_factory=dict)
    policy: dict[int, bool] = field(default_factory=dict)  # from `-op`: op id -> offloaded
    bench: list[str] = field(default_factory=list)  # words for each run of llama-bench
    common: list[str] = field(default_factory=list)  # words for each run of the other tools
    named: set[str] = field(default_factory=set)  # all names of the flags on the command line
    carried: set[str] = field(default_factory=set)  # names of the flags that each run gets
    cuda: dict[str, str] = field(default_factory=dict)  # pairs of `-cuda` without a setting in dyno
    model: str | None = None  # the model file on the command line
    kept: list[str] = field(default_factory=list)  # all other words, as the user wrote them
    served: bool = False
    server: list[str] = field(default_factory=list)  # words for each run of llama-server
    batch: int = 2048
    host_weights: bool = False  # because of placement rules for tensors
    gpu_layers: int | None = None


def parse_command(
    tokens: Sequence[str], help_: Help, bench: Help, engine: str, help_of: str = "", *, served: bool = False
) -> Command:
    """Parse a user's command line into settings and words that stay as they are.

    Args:
        tokens: `[NAME=VALUE…] [program] flags…`.
        help_: help of the tool that the command line starts.
        bench: help of llama-bench.
        help_of: name of the tool of `help_`, for messages.
        served: whether llama-server is measured, and not llama-bench.

    Raises:
        TuneError: this binary does not have a flag, or llama-bench cannot reproduce it. Without the flag, the
            measurement would differ from what the user runs.
    """
    out = Command(served=served)
    rest = list(tokens)
    while rest and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        out.env[name] = value
    if rest and not rest[0].startswith("-"):
        rest.pop(0)  # the program
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        flag = help_.get(name if equals else token)
        if flag is None:
            raise TuneError(f"the command line's {token!r} is not a flag of {help_of or 'this binary'}")
        values: list[str] = []
        if flag.argument or _UNTOLD & set(flag.names):
            if equals:
                values = [value]
            elif rest and not help_.has(rest[0]):
                values = [rest.pop(0)]
            else:  # usually a switch of an older version
                follows = f", and {rest[0]!r} follows" if rest else ""
                said = flag.argument.strip("<>[]{}() ")
                wanted = f" ({said})" if said else ""
                raise TuneError(
                    f"the command line's {token!r} needs a value{wanted} in this version{follows}"
                )
        _take(out, token, frozenset(flag.names), values, bench)
    if "sequences" in out.incumbent and help_.has("-kvu"):
        out.incumbent.setdefault("kv_unified", False)  # the default with a number of slots
    _variables(out, engine, bench)  # last, since the engine prefers a variable over a flag
    return out


def same_model(named: str, model: str) -> bool:
    """Whether a command line names the model that is tuned. Only file names are compared, because the command
    line may come from another machine or folder."""
    return os.path.basename(named) == os.path.basename(model) or os.path.realpath(named) == os.path.realpath(
        model
    )


def _variables(out: Command, engine: str, bench: Help) -> None:
    # An older ik_llama.cpp without -cuda only has the variable, so it stays.
    if "GGML_CUDA_DISABLE_GRAPHS" in out.env and (engine == "llama.cpp" or bench.has("-cuda")):
        del out.env["GGML_CUDA_DISABLE_GRAPHS"]  # even =0 counts as set
        out.incumbent["cuda_graphs"] = False
    if engine == "llama.cpp":
        if "GGML_CUDA_GRAPH_OPT" in out.env:
            out.incumbent["graph_concurrency"] = out.env.pop("GGML_CUDA_GRAPH_OPT") == "1"
        if "GGML_CUDA_DISABLE_FUSION" in out.env:
            out.incumbent["fusion"] = (
                _integer(out.env.pop("GGML_CUDA_DISABLE_FUSION"), "GGML_CUDA_DISABLE_FUSION") == 0
            )
        if "GGML_OP_OFFLOAD_MIN_BATCH" in out.env:
            name = "GGML_OP_OFFLOAD_MIN_BATCH"
            out.incumbent["offload_min_tokens"] = _integer(out.env.pop(name), name)


def _take(out: Command, token: str, names: frozenset[str], values: list[str], bench: Help) -> None:
    own = token.partition("=")[0]
    out.named |= names
    if own in _OPPOSITES and _OPPOSITES[own] in names:
        out.kept += [token]  # the default of the engine
        return
    knob = next((_KNOBS[n] for n in sorted(names) if n in _KNOBS), None)
    if knob == "mla_mode" and values == ["2"]:
        knob = None  # no setting for it, so it stays
    cache = next((_CACHE[n] for n in names if n in _CACHE), None)
    if out.served and _take_served(out, token, own, names, values):
        return
    if knob is not None:
        out.incumbent[knob] = _knob_value(knob, token, own, names, values)
    elif cache is not None:
        out.base[cache] = values[0].lower()
    elif names & {"-cmoe", "-ncmoe", "-sm"} or ("-ot" in names and from_buffers(values[0]) is not None):
        _place(out, token, names, values)
    elif "-b" in names:
        out.batch = _integer(values[0], token)
        out.kept += [token, *values] if "=" not in token else [token]
    elif "-cuda" in names:
        _cuda_pairs(out, values[0], bench)
    elif "-op" in names:
        _policy(out, token, values[0])
    else:
        _keep(out, token, names, values, bench)


def _take_served(out: Command, token: str, own: str, names: frozenset[str], values: list[str]) -> bool:
    """Take a flag that sets a setting of a server. Returns whether it does."""
    if names & {"-np", "-b"}:
        number = _integer(values[0], token)
        if number > 0:  # otherwise the server chooses, as without the flag
            out.incumbent["sequences" if "-np" in names else "batch"] = number
    elif "-kvu" in names:
        out.incumbent["kv_unified"] = own not in ("-no-kvu", "--no-kv-unified")
    elif "--spec-type" in names and values[0] in _DRAFTS:
        out.incumbent["spec"] = _DRAFTS[values[0]]
    elif "--spec-ngram-simple-size-m" in names:
        out.incumbent["spec_max"] = _integer(values[0], token)
    else:
        return False
    return True


def _keep(out: Command, token: str, names: frozenset[str], values: list[str], bench: Help) -> None:
    """Keep words as they are, and pass those to llama-bench that it takes."""
    given = [token] if "=" in token else [token, *values]
    out.kept += given
    if "-m" in names:
        out.model = values[0]
    if names & _FIT:
        if not values or values[0] not in ("off", "0", "false", "disabled"):
            raise TuneError("the command line's --fit lets the engine choose; give -ngl or -ot instead")
    elif names & _MODELS:
        raise TuneError(f"the command line's {token} names a model; give the file that it stands for as -m")
    elif out.served and names & _OF_LOADS:
        out.server += given
    elif not names & (_SERVING | _FITTED):
        try:
            out.bench += _for_bench(token, names, values, bench)
        except TuneError:
            if not out.served:
                raise
            out.server += given  # llama-bench does not run, and llama-perplexity may lack the flag
            return
        out.carried |= names
        out.common += given
        out.host_weights |= "-ot" in names
        if "-ngl" in names and values[0].isdigit():
            out.gpu_layers = int(values[0])


def _policy(out: Command, token: str, text: str) -> None:
    numbers = [_integer(part, token) for part in text.split(",")]
    if len(numbers) % 2 or any(on not in (0, 1) for on in numbers[1::2]):
        raise TuneError(f"the command line's {token} {text!r} is not a list of ID,0|1 pairs")
    out.policy |= {i: bool(on) for i, on in zip(numbers[::2], numbers[1::2], strict=True)}


def _place(out: Command, token: str, names: frozenset[str], values: list[str]) -> None:
    if "-sm" in names:
        out.base["split_mode"] = values[0]
        return
    out.host_weights = True
    if "-ot" in names:
        rules = [str(out.base["placement"])] if "placement" in out.base else []
        out.base["placement"] = ",".join([*rules, from_buffers(values[0]) or ""])
    else:
        # A number above that of any model means all layers.
        out.base["n_cpu_moe"] = 999 if "-cmoe" in names else _integer(values[0], token)
    if {"placement", "n_cpu_moe"} <= set(out.base):
        raise TuneError(
            f"the command line's {token}: -ot cannot be combined with -cmoe or -ncmoe here; write them all "
            "as -ot rules"
        )


def _knob_value(knob: str, token: str, own: str, names: frozenset[str], values: list[str]) -> Value:
    if "-no-fa" in names:
        return False
    if knob == "flash_attention":
        return not values or values[0].lower() in ("on", "auto", "1", "true", "enabled")
    if knob == "fused_moe":
        return "-no-fmoe" not in names
    if knob == "cpu_repack":
        return own not in ("-nr", "--no-repack")
    if knob == "mla_mode":
        if values[0] not in _MLA:
            raise TuneError(f"the command line's {token} {values[0]}: it is 0, 1, 2 or 3")
        return _MLA[values[0]]
    return _integer(values[0], token)


def _cuda_pairs(out: Command, text: str, bench: Help) -> None:
    """Split the value of `-cuda` into settings and other pairs. The binary reports other keys that it does
    not know."""
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not key or not equals or not value:
            raise TuneError(f"the command line's -cuda {pair!r} is not of the form KEY=VALUE")
        if key in _CUDA_KEYS:
            number = _integer(value, f"-cuda {key}")
            out.incumbent[_CUDA_KEYS[key]] = bool(number) if key in ("graphs", "fusion") else number
        elif bench.has("-cuda"):
            out.cuda[key] = value
        else:
            raise TuneError(f"the command line's -cuda {pair} cannot be reproduced in this llama-bench")


def _for_bench(token: str, names: frozenset[str], values: list[str], bench: Help) -> list[str]:
    """The same flag for llama-bench, which separates lists differently and gives switches a value."""
    wanted = sorted(names - _OWN, key=len)
    if "--no-mmap" in names:
        wanted, values = ["-mmp"], ["0"]
    elif "-no-gr" in names:
        wanted, values = ["-gr"], ["0"]
    elif names & {"-ts", "-dev"}:
        values = [values[0].replace(",", "/")]
    elif "-ngl" in names:
        values = [{"all": "999", "auto": "999"}.get(values[0], values[0])]
    elif "-ot" in names and bench.has("-nopo"):
        values = [values[0].replace(",", ";")]  # in llama-bench a comma separates tests
    elif not values and not names & _BARE:
        values = ["1"]
    flag = bench.get(*wanted)
    if flag is None:
        raise TuneError(
            f"the command line's {token} cannot be reproduced in llama-bench, so a measurement would "
            "not be of your command; leave it out of the command line"
        )
    if values and "," in values[0] and not names & _LISTS:
        raise TuneError(f"the command line's {token} {values[0]}: llama-bench would measure each by itself")
    # Take the first name: ik_llama.cpp does not accept every long name in its help.
    return [flag.names[0], *values]


def _integer(text: str, name: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise TuneError(f"the command line's {name} {text!r} is not a whole number")
    return int(text)
