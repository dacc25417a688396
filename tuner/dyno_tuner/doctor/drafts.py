"""Flags of speculative decoding with their effects, and the rule for lines without a draft."""

from __future__ import annotations

import re

from .line import COMMON, IK, MAIN, Flag, Item, Line, Status, nearest_hint

_C = (COMMON,)
_MODEL = "draft model for speculative decoding; its vocabulary must match that of the model"
_MOST = (
    "maximum number of drafted tokens. Each costs a step of the draft model, which pays off if most drafts "
    "are accepted"
)
_LEAST = "drafts with fewer tokens are not checked"
_P_MIN = "drafting stops at a token that is less probable in the draft model"
_LAYERS = "layers of the draft model on the GPU"
_CACHE = "cache type of the draft model; it changes speed and memory, but not the answers"
_THREADS = "threads of the draft model"

DRAFT_FLAGS: tuple[Flag, ...] = (
    Flag(("-md", "--model-draft", "--spec-draft-model"), _MODEL, MAIN, _C),
    Flag(("-hfrd", "-hfd", "--hf-repo-draft", "--spec-draft-hf"), _MODEL, MAIN, _C),
    Flag(("--spec-type",), "kinds of speculative decoding; some need no draft model; default none", MAIN, _C),
    Flag(("--spec-draft-n-max",), f"{_MOST}; default 3", MAIN, _C, form="int"),
    Flag(("--spec-draft-n-min",), f"{_LEAST}; default 0", MAIN, _C, form="int"),
    Flag(("--draft-p-min", "--spec-draft-p-min"), f"{_P_MIN}; default 0", MAIN, _C),
    Flag(("--draft-p-split", "--spec-draft-p-split"), "least probability of a token at which a draft "
        "branches", MAIN, _C),
    Flag(("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
         f"{_LAYERS}: a number, auto or all; default auto", MAIN, _C, values=("auto", "all"), form="int"),
    Flag(("-devd", "--device-draft", "--spec-draft-device"), "devices of the draft model", MAIN, _C),
    Flag(("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"), _CACHE, MAIN, _C),
    Flag(("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"), _CACHE, MAIN, _C),
    Flag(("-td", "--threads-draft", "--spec-draft-threads"), _THREADS, MAIN, _C, form="int"),
    Flag(("-tbd", "--threads-batch-draft", "--spec-draft-threads-batch"), _THREADS, MAIN, _C, form="int"),
    Flag(("-otd", "--override-tensor-draft", "--spec-draft-override-tensor"),
         "tensors of the draft model that match a pattern go to a buffer", MAIN, _C),
    Flag(("-cmoed", "--cpu-moe-draft", "--spec-draft-cpu-moe"),
         "expert tensors of the draft model stay in host memory", MAIN, _C, takes=False),
    Flag(("-ncmoed", "--n-cpu-moe-draft", "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"),
         "expert tensors of the draft model's first N layers stay in host memory", MAIN, _C, form="int"),
    Flag(("-md", "--model-draft"), _MODEL, IK, _C),
    Flag(("--spec-type",), "a kind of speculation with its limits, such as mtp:n_max=1; some need no draft "
        "model",
         IK, _C),
    Flag(("-ngld", "--gpu-layers-draft"), _LAYERS, IK, _C, form="int"),
    Flag(("-devd", "--device-draft"), "devices of the draft model", IK, _C),
    Flag(("-cd", "--ctx-size-draft"), "context of the draft model; by default that of its file", IK, _C,
         form="int"),
    Flag(("-ctkd", "--cache-type-k-draft"), _CACHE, IK, _C),
    Flag(("-ctvd", "--cache-type-v-draft"), _CACHE, IK, _C),
    Flag(("-td", "--threads-draft"), _THREADS, IK, _C, form="int"),
    Flag(("-tbd", "--threads-batch-draft"), _THREADS, IK, _C, form="int"),
    Flag(("-draft", "--draft-params"), "further flags of the draft model, separated by commas", IK, _C),
)  # fmt: skip
_NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
KINDS = {
    MAIN: ("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", *_NGRAMS),
    IK: ("none", "draft", "dflash", "dspark", "mtp", *_NGRAMS, "suffix"),
}
"""Values of `--spec-type`, from `--help` of the commits that the tables describe."""
KEYS = (
    "n_max", "n_min", "p_min", "heads", "cross_ctx", "ngram_size_n", "ngram_size_m", "ngram_min_hits",
    "suffix_min_match_len", "suffix_max_depth", "suffix_corpus",
)  # fmt: skip
"""Limits of a kind of speculation in ik_llama.cpp, as in `mtp:n_max=1,p_min=0.0`."""
_PLAIN_DRAFT = {MAIN: "draft-simple", IK: "draft"}
_STARTS = frozenset({"-md", "-hfrd", "--spec-type"})
_NAMES = frozenset(flag.name for flag in DRAFT_FLAGS)


def draft_rules(line: Line) -> None:
    """Report flags of a draft on a line that drafts nothing, and contradictory limits."""
    source = line.source
    found = [i for i in line.items if i.kind == "flag" and i.flag is not None and i.flag.name in _NAMES]
    for item in line.all("flag", "--spec-type"):
        if item.value is not None:
            _kinds(item, line, source)
    if not any(_starts(item) for item in found):
        for item in found:
            if item.flag is not None and item.flag.name not in _STARTS:
                why = "nothing is drafted: the line has no draft model and no --spec-type"
                item.say(Status.INERT, why, source)
    most, least = (_number(found, f"--spec-draft-n-{end}") for end in ("max", "min"))
    if most is not None and least is not None and least > most:
        for item in found:
            if item.flag is not None and item.flag.name == "--spec-draft-n-min":
                item.say(Status.INVALID, f"no draft has {least} tokens if at most {most} are drafted", source)


def _kinds(item: Item, line: Line, source: str) -> None:
    """Report kinds and limits of speculation that the engine does not have, and a draft without a model."""
    known = KINDS[line.engine]
    value = item.value or ""
    if line.engine == MAIN:
        kinds, limits = value.split(","), ""
    else:
        kind, _, limits = value.partition(":")
        kinds = [kind]
    for kind in kinds:
        if kind not in known:
            hint = nearest_hint(kind, known, 0.5)
            item.say(Status.INVALID, f"value {kind!r} is not one of {', '.join(known)}{hint}", source)
        elif kind == _PLAIN_DRAFT[line.engine] and not any(line.flag(f) for f in ("-md", "-hfrd")):
            item.say(Status.INVALID, f"{kind} needs a draft model, and the line names none; give -md", source)
    if len(kinds) > 1 and "none" in kinds:
        item.say(Status.INVALID, "none cannot be combined with other kinds", source)
    # A comma within quotes or after a backslash belongs to a value.
    for limit in (
        re.split(r",(?![^']*'(?:[^']*'[^']*')*[^']*$)", limits.replace("\\,", " ")) if limits else ()
    ):
        key, equals, _ = limit.partition("=")
        if key.strip() not in KEYS or not equals:
            hint = nearest_hint(key.strip(), KEYS, 0.5)
            item.say(Status.INVALID, f"limit {limit!r} is not one of {', '.join(KEYS)}{hint}", source)


def _starts(item: Item) -> bool:
    return item.flag is not None and item.flag.name in _STARTS and (item.value or "") not in ("", "none")


def _number(items: list[Item], name: str) -> int | None:
    values = [i.value or "" for i in items if i.flag is not None and i.flag.name == name]
    return int(values[-1]) if values and values[-1].isdecimal() else None
