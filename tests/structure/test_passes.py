"""An op list is emitted once and rewritten by passes: functions of a list, one file each."""

from __future__ import annotations

import re
from pathlib import Path

PLAN = Path(__file__).resolve().parents[2] / "csrc" / "plan"
HEADER = (PLAN / "passes" / "passes.h").read_text(encoding="utf-8")
LISTED = re.findall(r"^//   (\w+)  ", HEADER, re.MULTILINE)
FILES = {"place_weights": "place", "finish_list": "finish", "layout_arena": "arena"}


def test_each_pass_has_a_file_of_its_own() -> None:
    assert {"emit", "fuse", "expand_mla"} < set(LISTED)
    for name in LISTED:
        source = (PLAN / "passes" / f"{FILES.get(name, name)}.cpp").read_text(encoding="utf-8")
        assert re.search(rf"^\w+ {name}\(Plan& plan", source, re.MULTILINE), name


def test_the_plan_runs_them_in_the_order_of_the_list() -> None:
    text = (PLAN / "plan.cpp").read_text(encoding="utf-8")
    body = text[text.index("Plan build_plan(") :]
    found = [re.search(rf"\b{name}\(plan\b", body) for name in LISTED]
    places = [match.start() if match else -1 for match in found]
    assert min(places) > 0
    assert places == sorted(places)


def test_no_list_is_a_subclass_of_another() -> None:
    for path in PLAN.rglob("*"):
        if path.suffix in (".h", ".cpp"):
            text = re.sub(
                r"//.*|\"[^\"]*\"", "", path.read_text(encoding="utf-8")
            )  # "virtual devices" is no keyword
            assert not re.search(r"\b(virtual|override)\b", text), path
