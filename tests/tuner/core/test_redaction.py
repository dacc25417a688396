"""Secrets never reach what a tune writes."""

from __future__ import annotations

import shlex
import stat
import sys
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.cli.arguments import command_line
from dyno_tuner.core.redaction import redact_text, redact_words
from dyno_tuner.record.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", SECRET],
        [f"--api-key={SECRET}"],
        ["--hf-token", SECRET],
        ["-hft", SECRET],
        ["-H", f"Authorization: Bearer {SECRET}"],
        ["--header", f"X-Api-Key: {SECRET}"],
        [f"AWS_SECRET_ACCESS_KEY={SECRET}"],
        [f"HF_TOKEN={SECRET}"],
        [f"PGPASSWORD={SECRET}"],
        [f"DB_PASSWORD={SECRET}"],
        ["--ssl-key-password", SECRET],
        ["--storage", f"postgresql://me:{SECRET}@host/db"],
        ["--storage", f"postgresql://me:p@{SECRET}@host/db"],
        ["--storage", f"postgresql://me:p/{SECRET}@host/db"],
        ["--storage", f"postgresql://host/db?user=me&password={SECRET}&x=1"],
        [f"--storage=postgresql://host/db?sslpassword={SECRET}"],
        [f"--storage=mysql://host/db?ssl_key_password={SECRET}&charset=utf8"],
    ],
)
def test_a_secret_is_replaced_by_the_name_of_its_holder(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SECRET not in " ".join(redact_words(words))
    assert "***" in " ".join(redact_words(words))
    monkeypatch.setattr(
        sys, "argv", ["tune", "--engine", "llama.cpp", "--", "llama-server", *words, "-t", "4"]
    )
    recorded = command_line()
    assert SECRET not in recorded
    assert recorded.endswith(" -t 4")
    assert shlex.join(redact_words(shlex.split(recorded))) == recorded  # hiding twice changes nothing


@pytest.mark.parametrize(
    "words",
    [
        ["-t", "4", "--max-tokens", "128", "-n", "7"],
        ["-ot", "token_embd=CPU,blk.*.ffn=CUDA0", "--token-embedding-type", "q8_0"],
        ["-m", "/models/key=x token.gguf", "--workload", "pp=512,tg=128"],
        ["--storage", "sqlite:///study.db", "--host", "http://a:80/b"],
        ["--set", "ubatch=64", "--special-tokens", "x", "--keep", "3", "--api-prefix", "/v1"],
        ["--mmproj-url", "https://host/x?file=a@b"],
    ],
)
def test_the_rest_stays(words: list[str]) -> None:
    assert redact_words(words) == words


def test_urls_keep_user_and_host() -> None:
    assert redact_text("postgresql://me:a@b@host:5432/db") == "postgresql://me:***@host:5432/db"


def test_a_journal_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl") as made:
        made.append({"kind": "x"})
    assert stat.S_IMODE((tmp_path / "j.jsonl").stat().st_mode) == 0o600
