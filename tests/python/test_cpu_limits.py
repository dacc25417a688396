"""The cores and the memory that control groups leave to a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from dyno import Engine, _core, info
from dyno._effective import usable_cores
from own_process import found_by

MODEL = Path(__file__).parents[1] / "data" / "tiny" / "qwen3moe-tiny.gguf"


def tree(root: Path, groups: str, files: dict[str, str]) -> str:
    """A machine's proc and sys with these files below sys/fs/cgroup."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{n}": t for n, t in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}, 1.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "150000 100000\n"}, 0.5),
        ("0::/host/only\n", {"cpu.max": "100000 100000\n"}, 1.0),
        ("0::/../x\n", {"cpu.max": "100000 100000\n"}, 1.0),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 0.0),
        ("0::/a\n", {"a/cpu.max": "12monkeys -4\n"}, 0.0),
        ("0::/a\n", {"a/cpu.max": "99999999999999999999 0"}, 0.0),
        ("nonsense\n:\n", {}, 0.0),
        (
            "4:cpu,cpuacct:/d\n",
            {"cpu/d/cpu.cfs_quota_us": "100000", "cpu/d/cpu.cfs_period_us": "100000"},
            1.0,
        ),
        (
            "4:cpu,cpuacct:/d\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "5", "cpu,cpuacct/cpu.cfs_period_us": "4"},
            1.25,
        ),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}, 0.0),
    ],
)
def test_quota(tmp_path: Path, groups: str, files: dict[str, str], quota: float) -> None:
    limits = _core.cpu_limits(root=tree(tmp_path, groups, files))
    assert limits["quota"] == quota
    assert bool(limits["quota_from"]) == (quota > 0)
    expected = min(limits["affinity"], max(1, int(quota))) if quota else limits["affinity"]
    assert limits["cores"] == expected


@pytest.mark.parametrize(
    ("groups", "name", "text", "limit"),
    [
        ("0::/a/b\n", "a/memory.max", "1048576\n", 1048576),
        ("9:memory:/d\n", "memory/d/memory.limit_in_bytes", "2097152\n", 2097152),
        ("9:memory:/d\n", "memory/d/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("0::/a\n", "a/memory.max", "max\n", None),
    ],
)
def test_memory(tmp_path: Path, groups: str, name: str, text: str, limit: int | None) -> None:
    limits = _core.cpu_limits(root=tree(tmp_path, groups, {name: text}))
    assert limits["memory_bytes"] == (limit or limits["installed_bytes"])
    assert limits["memory_from"] == (str(tmp_path / "sys/fs/cgroup" / name) if limit else "")


@pytest.mark.parametrize(
    ("text", "threads", "shown"),
    [
        ("1", 1, "OMP_NUM_THREADS 1,"),
        ("1,4", 1, "OMP_NUM_THREADS 1,"),
        (" 1 , 4", 1, "OMP_NUM_THREADS 1,"),
        ("9999999999", 2**31 - 1, "OMP_NUM_THREADS 2147483647,"),
        ("", 0, "no OMP_NUM_THREADS,"),
        ("0", 0, "OMP_NUM_THREADS '0' ignored (not a number of threads),"),
        ("-3", 0, "OMP_NUM_THREADS '-3' ignored (not a number of threads),"),
        ("many\n", 0, "OMP_NUM_THREADS 'many\\n' ignored (not a number of threads),"),
        (",2", 0, "OMP_NUM_THREADS ',2' ignored (not a number of threads),"),
    ],
)
def test_omp_num_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, threads: int, shown: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    limits = _core.cpu_limits(root=tree(tmp_path, "0::/a\n", {}))
    assert limits["omp_threads"] == threads
    assert limits["cores"] == min(limits["affinity"], threads or limits["affinity"])
    facts = info.collect("cpu")
    assert shown in info.text({**facts, "limits": limits})


def test_omp_num_threads_is_the_default_of_threads_and_no_limit_of_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert usable_cores() == _core.cpu_info()["cores"] == 1
    with Engine(MODEL, device="cpu") as engine:
        assert engine.settings["threads"] == engine.settings["threads_batch"] == 1
    with Engine(MODEL, device="cpu", threads=2) as engine:
        assert engine.settings["threads"] == 2


def test_the_least_of_all_limits_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a\n", {"a/cpu.max": "100000 100000"})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert _core.cpu_limits(root=root)["cores"] == 1


def test_one_reader_of_control_groups(tmp_path: Path) -> None:
    """Cores and free memory follow one list: a mount of two controllers, a path that escapes, none."""
    files = {
        "cpu,memory/d/memory.limit_in_bytes": "700000",
        "cpu,memory/d/memory.usage_in_bytes": "500000",
        "cpu,memory/d/cpu.cfs_quota_us": "100000",
        "cpu,memory/d/cpu.cfs_period_us": "100000",
    }
    both = tree(tmp_path / "both", "4:cpu,memory:/d\n", files)
    assert _core.available_host_bytes(both) == 200_000
    assert _core.cpu_limits(both)["memory_bytes"] == 700_000
    assert _core.cpu_limits(both)["quota"] == 1.0

    inside = {"memory.max": "900000", "memory.current": "100000"}
    for number, groups in enumerate(("0::/../x\n", "")):
        root = tree(tmp_path / str(number), groups, inside)
        assert _core.available_host_bytes(root) == 800_000
    (tmp_path / "1/proc/self/cgroup").unlink()
    assert _core.available_host_bytes(str(tmp_path / "1")) == 800_000
    assert _core.cpu_limits(str(tmp_path / "1"))["memory_bytes"] == 900_000


def test_a_kernel_that_knows_more_cpus_than_a_usual_set() -> None:
    found, _ = found_by(Path(__file__).parent / "many_cpus.py")
    if not found["filtered"]:
        pytest.skip("the system takes no filter of calls")
    assert found["limits"]["affinity"] == len(found["cpus"])
    assert sorted(cpu for node in found["nodes"] for cpu in node["cpus"]) in ([], found["cpus"])


def test_one_place() -> None:
    limits = _core.cpu_limits()
    assert usable_cores() == _core.cpu_info()["cores"] == limits["cores"]
    assert _core.cpu_info()["memory_bytes"] == limits["memory_bytes"]


def test_info_names_the_limits(tmp_path: Path) -> None:
    facts = info.collect("cpu")
    root = tree(tmp_path, "0::/a\n", {"a/cpu.max": "150000 100000", "a/memory.max": "1073741824"})
    facts["limits"] = _core.cpu_limits(root=root)
    shown = info.text(facts)
    assert f"quota 1.5 CPUs ({tmp_path}/sys/fs/cgroup/a/cpu.max)" in shown
    assert f"memory limit 1.0 of {facts['limits']['installed_bytes'] / 2**30:.1f} GiB" in shown
