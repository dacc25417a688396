"""The verdicts of `tune verify` as JUnit XML, which CI systems can display."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..core.intervals import Estimate
    from .verify import Verdict

_PASSES = "keep"


@dataclass
class Suite:
    """A test suite for a profile: its verdicts, or the reason why there are none."""

    profile: str
    seconds: float
    verdicts: Sequence[Verdict] = ()
    gain: Mapping[str, Estimate] = field(default_factory=dict)
    skipped: str = ""
    """The reason why nothing had to be measured, if so."""
    error: str = ""
    """The reason why nothing could be measured."""


def junit(suite: Suite) -> str:
    """The XML of a suite. Each entry is a test, which fails unless its verdict is `keep`."""
    tests = [_case(suite, v) for v in suite.verdicts]
    if suite.skipped or suite.error or not tests:
        case = ElementTree.Element("testcase", name="profile", classname=_clean(suite.profile))
        if suite.error:
            ElementTree.SubElement(case, "error", message=_clean(suite.error))
        elif suite.skipped:
            ElementTree.SubElement(case, "skipped", message=_clean(suite.skipped))
        tests.append(case)
    counts = {
        "tests": len(tests),
        "failures": sum(v.verdict != _PASSES for v in suite.verdicts),
        "errors": int(bool(suite.error)),
        "skipped": int(bool(suite.skipped) and not suite.error),
    }
    numbers = {name: str(value) for name, value in counts.items()}
    root = ElementTree.Element("testsuites", numbers)
    top = ElementTree.SubElement(
        root, "testsuite", {"name": _clean(suite.profile), "time": f"{suite.seconds:.1f}", **numbers}
    )
    if suite.gain:
        properties = ElementTree.SubElement(top, "properties")
        for metric, gain in suite.gain.items():
            told = f"{gain.ratio:.4f} [{gain.low:.4f}, {gain.high:.4f}]"
            ElementTree.SubElement(properties, "property", name=f"gain {metric}", value=told)
    top.extend(tests)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def write_junit(path: Path, suite: Suite) -> None:
    path.write_text(junit(suite), encoding="utf-8")


def _case(suite: Suite, verdict: Verdict) -> ElementTree.Element:
    case = ElementTree.Element("testcase", name=_clean(verdict.entry), classname=_clean(suite.profile))
    measured = verdict.measured
    now = "" if measured is None else str(measured)
    then = "" if verdict.recorded is None else f"recorded {verdict.recorded:.3f} ×"
    told = "; ".join(part for part in (verdict.reason, now, then) if part)
    if verdict.verdict != _PASSES:
        ElementTree.SubElement(case, "failure", type=verdict.verdict, message=_clean(told))
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(told)
    return case


def _clean(text: str) -> str:
    """`text` without characters that are not valid in XML 1.0."""
    return "".join(c if c in "\t\n" or (ord(c) >= 32 and ord(c) not in (0xFFFE, 0xFFFF)
                   and not 0xD800 <= ord(c) <= 0xDFFF) else "\ufffd" for c in text)  # fmt: skip
