"""The rules of `-ot`: how its value is split into patterns and buffers, and which of them can't work.

Both engines split at commas (llama-bench of llama.cpp also at semicolons) and at the first `=`. Neither of
them trims blanks. No tensor name holds a blank.
"""

from __future__ import annotations

import re

from .line import IK, IK_SOURCE, MAIN, MAIN_SOURCE, Line, Status

_SOURCES = {
    IK: f"{IK_SOURCE}, common.cpp parse_buft_overrides",
    MAIN: f"{MAIN_SOURCE}, common/arg.cpp parse_tensor_buffer_overrides",
}


def override_rules(line: Line) -> None:
    """Names each rule of an `-ot` that matches nothing, or that stops the program."""
    source = _SOURCES[line.engine]
    separators = "[,;]" if line.bench and line.engine == MAIN else ","
    for item in line.all("flag", "-ot"):
        if item.flag is None:
            continue
        for rule in re.split(separators, item.value or ""):
            pattern, equals, buffer = rule.partition("=")
            if not equals:
                item.say(Status.INVALID, f"rule {rule!r} is not PATTERN=BUFFER: the program stops", source)
                continue
            if pattern != pattern.strip():
                where = "begins" if pattern[:1].isspace() else "ends"
                item.say(
                    Status.INVALID,
                    f"pattern {pattern!r} {where} with a blank, which {line.engine} does not trim, so that "
                    f"it never matches; write {pattern.strip() + '=' + buffer.strip()!r}",
                    source,
                )
            if buffer != buffer.strip():
                item.say(
                    Status.INVALID,
                    f"buffer {buffer!r} has a blank, which {line.engine} does not trim, so that the program "
                    "stops at an unknown buffer",
                    source,
                )
