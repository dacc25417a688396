"""`tune doctor` on ids of ops, which versions of ik_llama.cpp have renumbered."""

from __future__ import annotations

import pytest
from doctor_lines import find, says
from dyno_tuner.doctor import diagnose
from dyno_tuner.doctor.line import IK

EXPERTS = "MUL_MAT,0,MUL_MAT_ID,0,MOE_FUSED_UP_GATE,0"


@pytest.mark.parametrize(
    ("ids", "version", "status", "by_name", "today"),
    [
        ("26,0,27,0,29,0", "2025-08-14", "does", EXPERTS, "27,0,28,0,31,0"),
        ("26,0,27,0,29,0", "b50efcc9d", "does", EXPERTS, "27,0,28,0,31,0"),
        ("26,0,27,0,29,0", "2025-08-15", "renumbered", EXPERTS, "27,0,28,0,31,0"),
        ("26,0,27,0,29,0", "fc06bc9", "renumbered", EXPERTS, "27,0,28,0,31,0"),
        ("26,0,27,0,29,0", None, "renumbered", EXPERTS, "27,0,28,0,31,0"),
        ("27,0,28,0,30,0", "2025-08-30", "does", EXPERTS, "27,0,28,0,31,0"),
        ("27,0,28,0,31,0", None, "does", EXPERTS, "27,0,28,0,31,0"),
        ("27,0,28,0,31,0", "2025-08-20", "renumbered", EXPERTS, "27,0,28,0,31,0"),
        ("28,0,31,0", None, "does", "MUL_MAT_ID,0,MOE_FUSED_UP_GATE,0", "28,0,31,0"),
        ("28,0,30,0", None, "does", "MUL_MAT_ID,0,FUSED_UP_GATE,0", "28,0,30,0"),
        ("29,0", "2025-06-01", "does", "MOE_FUSED_UP_GATE,0", "31,0"),
        ("29,0", None, "renumbered", "MOE_FUSED_UP_GATE,0", "31,0"),
        ("-1,0", None, "does", "all ops,0", "-1,0"),
        ("111,0", None, "does", "all ops,0", "-1,0"),
        ("42,1", None, "inert", "GET_ROWS,1", "42,1"),
        ("42,1", "2025-09-15", "unknown", None, None),
        ("26,0", "2024-01-01", "unknown", None, None),
    ],
)
def test_op_ids(ids: str, version: str | None, status: str, by_name: str | None, today: str | None) -> None:
    item = find(diagnose(["llama-sweep-bench", "-op", ids], engine=IK, version=version), "-op")
    assert (str(item.status), item.by_name, item.rewritten) == (status, by_name, today), says(item)


def test_op_list_that_is_read_silently_wrong() -> None:
    for value, text in (
        ("MUL_MAT,0", "id 0"),
        ("27", "drops"),
        ("27,0,28", "drops"),
        ("27,2", "neither 0"),
    ):
        item = find(diagnose(["llama-server", "-op", value], engine=IK), "-op")
        assert item.wrong, value
        assert text in says(item)
    said = says(find(diagnose(["-op", "26,0,27,0,29,0"]), "-op"))
    assert "MULTI_ADD, MUL_MAT, OUT_PROD" in said
    assert "MUL_MAT, MUL_MAT_ID, MOE_FUSED_UP_GATE" in said
