"""`tune --ray` with the real engine, in a worker of a cluster of this machine alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dyno import profiles
from dyno_tuner.cli.commands import app
from dyno_tuner.execution.ray_workers import Cluster
from dyno_tuner.record import journal
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gguf-dyno[ray]'")


@pytest.mark.alone
def test_the_command(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to the profile. It measures this machine: beside other programs, it takes minutes."""
    monkeypatch.setattr("dyno_tuner.execution.ray_workers.LOCAL_SECONDS", 300.0)
    cluster = Cluster("local", num_cpus=2, object_store_memory=80_000_000)
    end = cluster.close
    monkeypatch.setattr("dyno_tuner.execution.ray_workers.Cluster", lambda address: cluster)
    monkeypatch.setattr(cluster, "close", lambda: None)
    out = tmp_path / "p.yaml"
    model = ["-m", str(tiny_dir / "qwen3moe-tiny.gguf"), "--workload", "pp=32,tg=4", "--ctx", "64"]
    words = [*model, "--ray", "local", "--no-kernels", "--out", str(out), "-q", "--budget"]
    try:
        for budget in ("20s", "2m", "10m"):  # a busy machine needs more time to prove anything
            done = CliRunner().invoke(app, [*words, budget])
            if out.exists():
                break
    finally:
        end()
    assert done.exit_code == 0, done.output + str(done.exception)
    assert profiles.load_profile(out).evidence is not None
    assert any(r.get("note") == "machine" for r in journal.load(journal.of_profile(out)).records)
