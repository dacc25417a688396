"""Pre-tokenizers: the rules that cut text into words before byte-pair merging, by the name in
`tokenizer.ggml.pre`.

Each entry is the sequence of splits that the model was trained with, as published in its `tokenizer.json`
(for Kimi, its tiktoken pattern). The patterns are the originals, because they run in the regex engine of
those files (Oniguruma, inside `tokenizers`). Only one pattern of deepseek-llm has an addition, which saves
time and changes no match. Each split turns its matches, and the text between them, into separate pieces. The
next split cuts those pieces further.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dyno.errors import UnsupportedError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """The pattern of GPT-4; models differ in the number of digits that stay together."""
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTION}|{word}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"


def _o200k(digits: str, suffix: str, *, stop: str = r"[\r\n/]*", without: str = "") -> str:
    """The pattern of GPT-4o, which cuts words between a lower-case and an upper-case letter."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+{stop}|{_SPACE}"
    )


# The letters with case, as the file lists them. They are written as escapes, because editors that normalise
# text would change some of them.
_DEEPSEEK_WORD = (
    "["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_PUNCTUATION_RUN = r"[\p{P}\$\+<=>\^~\|`]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A published set of rules that cut text into words."""

    splits: tuple[str, ...]
    """Regular expressions applied in turn."""
    ignore_merges: bool = False
    """Whether a word that is itself a token stays whole, even if the merges would not produce it."""
    add_bos: bool = False
    """Whether text starts with the BOS token if the file does not specify it."""
    raw: bool = False
    """Whether merges join characters, with "▁" for a blank, instead of symbols for bytes. Byte tokens spell
    other characters."""


_LLAMA3 = PreTokenizer((_cl100k("{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_cl100k(""),))
_GLM4 = PreTokenizer((_cl100k("{1,3}"),))
_GPT_2 = PreTokenizer((_GPT2,))
_STARCODER = PreTokenizer((_DIGIT, _GPT2))
_GPT_4O = PreTokenizer((_o200k("{1,3}", _CONTRACTION + "?"),))
_V3 = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3))
_BLOOM = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

GEMMA4 = "gemma4"
"""The name is also a value of `tokenizer.ggml.model`. Such a file need not name its pre-tokenizer."""

# Names that share the same rules.
_FAMILIES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (_LLAMA3, ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")),
    (_GLM4, ("glm4", "glm5", "chatglm-bpe", "dbrx", "smaug-bpe")),
    (
        _QWEN2,
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2", "solar-open", "kormo"),
    ),
    (
        _GPT_2,
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "mellum",
            "a.x-4.0",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
        ),
    ),
    (
        _STARCODER,
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (_GPT_4O, ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (_V3, ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (_BLOOM, ("bloom", "poro-chat", "gpt3-finnish")),
    (_BAILING, ("bailingmoe", "bailingmoe2", "llada-moe")),
)
_BY_NAME: dict[str, PreTokenizer] = {
    **{name: pre for pre, names in _FAMILIES for name in names},
    "viking": PreTokenizer((*_BLOOM.splits, _DIGIT)),
    # Each line is one word: merges cross blanks, but never the end of a line.
    GEMMA4: PreTokenizer((r"[^\n]+|\n+",), add_bos=True, raw=True),
    "tekken": PreTokenizer((_o200k("", ""),), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer(
        (r"[\p{Han}]+|" + _o200k("{1,3}", _CONTRACTION + "?", stop=r"[\r\n]*", without=r"&&[^\p{Han}]"),)
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_WORD}+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            # As published, `\s+$`, but only from the first blank of a run on: at each further one the search
            # would walk to the end of the run again.
            r"(?<!\s)\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "falcon": PreTokenizer((_PUNCTUATION_RUN, _GPT2, r"[0-9][0-9][0-9]")),
    # The format calls this "default". It applies only if the file names it.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _cl100k("+")), ignore_merges=True),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",
        )
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
        )
    ),
}


def names() -> list[str]:
    """Every known value of `tokenizer.ggml.pre`, sorted."""
    return sorted(_BY_NAME)


def find(name: str | None) -> PreTokenizer:
    """The pre-tokenizer called `name` in a GGUF file.

    Raises:
        UnsupportedError: The name is unknown or absent. There is no default, because a wrong one gives
        plausible text of lower quality, which nobody notices.
    """
    if not name:
        raise UnsupportedError(
            "[tokenizer] the file has no tokenizer.ggml.pre, so it is unknown how text is split into words; "
            "convert the model again with a current converter, or set the key"
        )
    found = _BY_NAME.get(name)
    if found is None:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; the most similar known name is {near[0]!r}" if near else ""
        raise UnsupportedError(f"[tokenizer] unknown pre-tokenizer tokenizer.ggml.pre = {name!r}{hint}")
    return found
