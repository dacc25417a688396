"""The code asks for facts of a model; only the file of an architecture holds its name."""

from __future__ import annotations

import re
from pathlib import Path

from dyno import _core

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {".cpp", ".h", ".cu", ".cuh", ".in", ".py"}
ALLOWED = (
    "csrc/model/arch/",
    "csrc/model/model_desc.cpp",  # the list of them
    "python/dyno/chat/_built_in.py",  # names of prompt formats, some of which are called alike
    "python/dyno/_pretokenizers.py",  # likewise of pre-tokenizers
    "python/dyno/_vocabulary.py",  # likewise of tokenizers
    "python/dyno/testing/",  # writes models
    "tuner/dyno_tuner/doctor/",  # facts on other engines, by their names
    "tuner/dyno_tuner/targets/replay/",  # the models of a recorded sweep
)


def test_no_code_asks_for_an_architectures_name() -> None:
    names = "|".join(re.escape(name) for name in _core.architectures())
    quoted = re.compile(rf"""["'](?:{names})["']""")
    found = []
    for folder in ("csrc", "python", "tuner"):
        for path in sorted((ROOT / folder).rglob("*")):
            where = path.relative_to(ROOT).as_posix()
            if path.suffix not in ENDINGS or where.startswith(ALLOWED):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                comment = re.sub(r"//.*|#.*|^\s*>>>.*", "", line)
                if quoted.search(comment):
                    found.append(f"{where}:{number}: {line.strip()}")
    assert found == []
