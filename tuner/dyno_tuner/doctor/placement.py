"""The placement of the tensors of a model file by a line: the rules that match, further tensors that they
move, and whether the result fits.

In both engines, the overrides of `-ot`, `-cmoe` and `-ncmoe` are one list in the order of the line. The first
one that matches the name of a tensor decides. Other tensors follow `-ngl`, and the token embedding stays in
host memory. llama.cpp counts the output as the last layer. ik_llama.cpp counts only layers: if the GPU has
only some of them, the output is on the CPU, unless `-sm` is a mode other than layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .line import MAIN, Status, nearest
from .overrides import broken_pattern, compiled

if TYPE_CHECKING:
    from .line import Item, Line

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
CPU = frozenset({"CPU", "CPU_Mapped", "CPU_REPACK", "CUDA_Host"})


@dataclass
class _Rule:
    item: Item
    pattern: str
    buffer: str
    regex: re.Pattern[str] | None
    matched: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)


def placement(line: Line) -> None:
    """Check `-ot`, `-cmoe`, `-ncmoe` and `-ngl` against the tensors of the model, if they are known."""
    tensors = line.facts.tensors
    if not tensors or line.tool == "cmake":
        return
    rules = _rules(line)
    on_gpu, on_cpu = 0, 0
    for name, size in tensors:
        buffer = _buffer_of(name, rules, line)
        if buffer in CPU:
            on_cpu += size
        else:
            on_gpu += size
    for rule in rules:
        _judge(rule, line)
    _layers(line)
    _fits(line, on_gpu, on_cpu, rules)


def _rules(line: Line) -> list[_Rule]:
    rules: list[_Rule] = []
    separators = "[,;]" if line.bench and line.engine == MAIN else ","
    for item in line.items:
        if item.kind != "flag" or item.flag is None or item.replaced:
            continue
        if item.name == "-ot":
            for text in re.split(separators, item.value or ""):
                pattern, equals, buffer = text.partition("=")
                if equals:
                    rules.append(_Rule(item, pattern, buffer, _compiled(item, pattern)))
        elif item.name == "-cmoe":
            rules.append(_Rule(item, EXPERTS, "CPU", re.compile(EXPERTS)))
        elif item.name in ("-ncmoe", "--n-cpu-moe") and (item.value or "").isdecimal():
            count = min(int(item.value or 0), 100_000)
            if count:
                numbers = "|".join(str(n) for n in range(min(count, line.facts.layers or count)))
                pattern = rf"^blk\.({numbers}){EXPERTS}"
                rules.append(_Rule(item, pattern, "CPU", re.compile(pattern)))
    return rules


def _compiled(item: Item, pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern. For usual patterns, Python reads the same as ECMAScript. A pattern that it cannot
    read is not checked."""
    try:
        return compiled(pattern)
    except (re.error, RecursionError, OverflowError):
        if not broken_pattern(pattern):  # which is reported without a model, too
            item.say(
                Status.UNKNOWN,
                f"dyno cannot read pattern {pattern!r}, so it is not checked against the model",
            )
        return None


def _buffer_of(name: str, rules: list[_Rule], line: Line) -> str:
    decided = ""
    for rule in rules:
        if rule.regex is None or not rule.regex.search(name):
            continue
        rule.matched.append(name)
        if not decided:
            rule.decided.append(name)
            decided = rule.buffer
    if decided:
        return decided
    layers, wanted = line.facts.layers, line.numbers("-ngl")
    if name.startswith("token_embd."):
        return "CPU"
    if layers is None or len(wanted) != 1 or wanted[0] < 0 or wanted[0] > layers:
        return "GPU"  # all layers, or the engine chooses
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is None:
        return "GPU" if _output_on_gpu(line, wanted[0]) else "CPU"
    return "GPU" if int(layer[1]) >= _first_on_gpu(line, wanted[0], layers) else "CPU"


def _first_on_gpu(line: Line, wanted: int, layers: int) -> int:
    """Number of the first layer on the GPU; `layers` if there is none."""
    return min(layers, layers - wanted + (line.engine == MAIN))


def _output_on_gpu(line: Line, wanted: int) -> bool:
    """Whether the output is on the GPU, if the GPU does not have all layers."""
    split = line.flag("-sm")
    others = split is not None and split.value in ("none", "graph", "attn")
    return wanted > 0 and (line.engine == MAIN or others)


def _judge(rule: _Rule, line: Line) -> None:
    if rule.regex is None:
        return
    what = f"rule {rule.pattern}={rule.buffer}" if rule.item.name == "-ot" else rule.item.text
    if not rule.matched:
        names = [name for name, _ in line.facts.tensors or ()]
        hint = f"; the tensors have names such as {_example(rule.pattern, names)}"
        rule.item.say(Status.INVALID, f"{what} matches no tensor of the model{hint}")
        return
    if not rule.decided:
        rule.item.say(Status.INERT, f"{what}: earlier rules decide about all {len(rule.matched)} tensors")
        return
    if rule.item.name != "-ot" or rule.buffer not in CPU:
        return
    experts = [name for name in rule.decided if re.search(EXPERTS, name)]
    beside = [name for name in rule.decided if not re.search(EXPERTS, name)]
    if experts and beside:
        kinds = sorted({re.sub(r"^blk\.\d+\.", "", name) for name in beside})
        named = ", ".join(kinds[:4]) + (", …" if len(kinds) > 4 else "")
        rule.item.say(
            Status.INVALID,
            f"{what} moves {len(experts)} expert tensors, and also {len(beside)} others, "
            f"which every token reads ({named}); to exclude those, end the pattern with _exps",
        )
    number = re.search(r"blk\\?\.(\d+)(?:$|\.\*|\.?\+)", rule.pattern)
    found = sorted({int(m[1]) for name in rule.decided if (m := re.match(r"blk\.(\d+)\.", name))})
    more = [n for n in found if number and n != int(number[1]) and str(n).startswith(number[1])]
    if number and more:
        rule.item.say(
            Status.INVALID,
            f"{what} also matches layers {', '.join(map(str, more[:10]))}, whose numbers begin with "
            rf"{number[1]}; write blk\.{number[1]}\.",
        )


def _example(pattern: str, names: list[str]) -> str:
    words = re.sub(r"[^a-z0-9_.]+", " ", pattern.replace("\\", "").lower()).strip()
    return nearest(words, names, 0.0) or names[0]


def _layers(line: Line) -> None:
    item, layers, wanted = line.flag("-ngl"), line.facts.layers, line.numbers("-ngl")
    if layers is None:
        return
    for name in ("-ncmoe", "--n-cpu-moe", "-ncffn"):
        most = max(line.numbers(name), default=0)
        moved = line.flag(name)
        if moved is not None and most > layers:
            moved.say(
                Status.INERT,
                f"{most} is more than the {layers} layers of the model: {layers} does the same"
                + ("" if name == "-ncffn" or line.bench else ", and so does -cmoe"),
            )
    if item is None or len(wanted) != 1 or item.wrong:
        return
    if 0 <= wanted[0] <= layers:
        left = _first_on_gpu(line, wanted[0], layers)
        parts = ["all layers" if left == layers else f"{left} of {layers} layers"] if left else []
        parts += [] if _output_on_gpu(line, wanted[0]) else ["the output"]
        if parts:
            what = f"{' and '.join(parts)} {'stays' if parts == ['the output'] else 'stay'} in host memory"
            item.say(Status.DOES, f"{what}; {layers + 1} moves all to the GPU")


def _fits(line: Line, on_gpu: int, on_cpu: int, rules: list[_Rule]) -> None:
    item = line.flag("-ngl") or (rules[-1].item if rules else None)
    if item is None:
        return
    item.say(Status.DOES, f"weights on the GPU: {_gib(on_gpu)}; in host memory: {_gib(on_cpu)}")
    limit, gpus = line.facts.vram_bytes, line.facts.gpus or 1
    if limit is not None and on_gpu > limit * gpus:
        experts = sum(size for name, size in line.facts.tensors or () if re.search(EXPERTS, name))
        layers = line.facts.layers or 1
        short = on_gpu - limit * gpus
        per_layer = experts / layers
        advice = f"; to fit, raise -ncmoe by {-(-short // int(per_layer))} or more" if per_layer >= 1 else ""
        item.say(
            Status.INVALID,
            f"the weights are {_gib(short)} too large for {gpus} GPU{'s' if gpus > 1 else ''} of "
            f"{_gib(limit)}, without cache and buffers{advice}",
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
