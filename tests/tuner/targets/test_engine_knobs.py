"""What is searched on which machine, how it is spelled for real binaries, and what is never proposed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from dyno_tuner.core.errors import TargetUnusable, TuneError
from dyno_tuner.core.protocol import Configuration, OpContext, Workload
from dyno_tuner.targets.ggml import target as ggml_target
from dyno_tuner.targets.ggml.applicability import Here, defaults, find_op_ids, refusal, refusals, split_modes
from dyno_tuner.targets.ggml.command_line import parse_command
from dyno_tuner.targets.ggml.help import Flag, Help, parse_help
from dyno_tuner.targets.ggml.installation import Installation
from dyno_tuner.targets.ggml.knobs import legal, make_knobs
from dyno_tuner.targets.ggml.spelling import NoSpelling, from_buffers, spell, to_buffers
from dyno_tuner.targets.ggml.sweep_bench import parse_rows, sweep
from dyno_tuner.targets.ggml.target import GgmlTarget
from fake_engines import DATA, fake

if TYPE_CHECKING:
    from pathlib import Path

MAIN, IK, OLD_MAIN = "llama.cpp-0c1e570", "ik_llama.cpp-4840", "llama.cpp-4227c9b"
OLD_IK = "ik_llama.cpp-3848"
VERSIONS = [OLD_MAIN, MAIN, OLD_IK, IK]
TOOLS = ("llama-bench", "llama-server", "llama-perplexity", "llama-sweep-bench")
H200 = {"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 143771}
SMALL = {**H200, "compute_capability": "8.6", "memory_mib": 24000}
MOE = {"architecture": "qwen3moe", "layers": 48, "experts": 128, "experts_used": 8, "file_bytes": 17 << 30}
DENSE = {"architecture": "qwen3", "layers": 36, "file_bytes": 8 << 30}
MLA = {**MOE, "latent_cache": True}


def help_of(version: str, tool: str) -> Help:
    return parse_help((DATA / f"{version}-{tool}.help").read_text())


def whole_help(version: str, tool: str) -> Help:
    """With the flags that the binary takes unlisted."""
    found, unlisted = help_of(version, tool), DATA / f"{version}.unlisted"
    names = unlisted.read_text().split() if tool == "common" and unlisted.exists() else []
    return Help({**found.flags, **{n: Flag((n,), "N") for n in names}})


def here(tmp_path: Path, version: str, device: dict[str, Any], model: dict[str, Any], **more: Any) -> Here:
    folder = fake(tmp_path / "bin", version, TOOLS)
    # The names in the files of a build with CUDA.
    (folder / "libggml-cuda.so").write_bytes(b"".join(
        n + b"\0" for n in (b"GGML_CUDA_DISABLE_GRAPHS", b"GGML_CUDA_GRAPH_OPT", b"GGML_CUDA_DISABLE_FUSION",
                            b"GGML_OP_OFFLOAD_MIN_BATCH")
    ))  # fmt: skip
    given: dict[str, Any] = {"host_weights": False, **more}
    return Here(Installation(str(folder), version.rpartition("-")[0]), device, model, **given)


def described(place: Here) -> dict[str, Any]:
    return {
        "name": place.install.engine, "defaults": defaults(place, 16), "answers_compared": True, "cores": 16,
        "split_modes": split_modes(place.install),
    }  # fmt: skip


def searched(place: Here, approx: bool = False) -> set[str]:
    knobs = make_knobs(described(place), place.model, Workload(pp=4096, tg=128), approx=approx)
    return {k.name for k in knobs}


@pytest.mark.parametrize(("version", "model", "least"), [(IK, MOE, 4), (IK, DENSE, 32), (MAIN, MOE, 32)])
def test_no_offload_threshold_lets_single_tokens_copy_weights(
    tmp_path: Path, version: str, model: dict[str, Any], least: int
) -> None:
    place = here(
        tmp_path, version, SMALL, model, host_weights=True, base={} if model is DENSE else {"n_cpu_moe": 24}
    )

    def smallest(pp: int) -> int:
        knobs = make_knobs(described(place), place.model, Workload(pp=pp, tg=128), approx=False)
        return min(int(v) for v in next(k.values for k in knobs if k.name == "offload_min_tokens"))

    assert smallest(4096) == least
    assert smallest(16) >= 2


def test_what_is_searched_on_a_gpu_that_holds_the_model(tmp_path: Path) -> None:
    both = {"ubatch", "flash_attention", "cuda_graphs", "fusion"}
    ik = here(tmp_path / "i", IK, H200, MOE)
    assert searched(ik) == both | {"fused_moe", "mmq_id_size"}
    assert searched(here(tmp_path / "m", MAIN, H200, MOE)) == both | {"graph_concurrency"}
    assert searched(here(tmp_path / "l", IK, H200, MLA)) >= {"mla_mode", "attention_max_batch_mib"}
    assert searched(ik, approx=True) - searched(ik) == {"kv_type_k", "kv_type_v"}
    why = refusals(ik)
    assert "fits" in why["placement"]
    assert "fits" in why["n_cpu_moe"]
    assert "one GPU" in why["split_mode"]
    assert "so it has no effect" in why["threads"]


def test_what_is_searched_with_weights_in_host_memory(tmp_path: Path) -> None:
    base = {"placement": "exps=cpu"}
    install = Installation(str(fake(tmp_path / "x", IK, TOOLS)), "ik_llama.cpp")
    ids = find_op_ids(install, "m.gguf", wanted=True)
    place = here(tmp_path, IK, SMALL, MOE, host_weights=True, base=base, op_ids=ids)
    found = searched(place)
    assert found >= {"offload_min_tokens", "threads", "cpu_repack", "placement"}
    assert found >= {"op_offload.matmul_id", "op_offload.moe_up_gate"}
    assert not found & {"op_offload.matmul", "op_offload.embed", "n_cpu_moe"}
    assert described(place)["defaults"]["placement"] == "exps=cpu"
    assert "another way" in refusal("n_cpu_moe", place)
    main = here(tmp_path / "m", MAIN, SMALL, MOE, host_weights=True, base={"n_cpu_moe": 24})
    assert searched(main) >= {"offload_min_tokens", "threads", "n_cpu_moe", "cpu_repack"}
    assert "no offload policy by op" in refusal("op_offload.matmul_id", main)
    assert "no experts" in refusal("n_cpu_moe", here(tmp_path / "d", MAIN, SMALL, DENSE))


def test_policies_by_name_are_refused_without_ids(tmp_path: Path) -> None:
    none = Installation(str(fake(tmp_path / "n", IK)), "ik_llama.cpp")
    why = find_op_ids(none, "m.gguf", wanted=True)
    assert isinstance(why, str)
    assert "no llama-sweep-bench" in why
    place = here(tmp_path, IK, SMALL, MOE, host_weights=True, op_ids=why)
    assert refusal("op_offload.matmul_id", place) == why
    missing = here(tmp_path / "y", IK, SMALL, MOE, host_weights=True, op_ids={"NONE": 0, "MUL_MAT": 27})
    assert "no op MUL_MAT_ID" in refusal("op_offload.matmul_id", missing)
    off = {"op_offload.matmul_id": False, "op_offload.moe_up_gate": False, "op_offload.matmul": True}
    gpu = help_of(IK, "common")
    ids = {"MUL_MAT": 27, "MUL_MAT_ID": 28, "MOE_FUSED_UP_GATE": 31}
    assert spell(off, "ik_llama.cpp", gpu, bench=False, op_ids=ids).all_args() == ["-op", "28,0,31,0"]
    with pytest.raises(NoSpelling, match="MUL_MAT_ID in this binary is unknown"):
        spell(off, "ik_llama.cpp", gpu, bench=False, op_ids={"MUL_MAT": 27})
    with pytest.raises(NoSpelling, match="has no -op"):
        spell(off, "ik_llama.cpp", help_of(IK, "bench"), bench=True, op_ids=ids)


def test_the_users_own_values_can_race(tmp_path: Path) -> None:
    engine = {**described(here(tmp_path, MAIN, H200, MOE)), "incumbent": {"ubatch": 100}}
    knobs = make_knobs(engine, MOE, Workload(pp=512, tg=8), approx=False)
    (ubatch,) = [k for k in knobs if k.name == "ubatch"]
    assert ubatch.values == (64, 100, 128, 256, 512)


def test_several_gpus(tmp_path: Path) -> None:
    place = here(tmp_path, IK, SMALL, MOE, gpus=2)
    (knob,) = [
        k
        for k in make_knobs(described(place), MOE, Workload(pp=64, tg=8), approx=False)
        if k.name == "split_mode"
    ]
    assert knob.values == ("layer", "graph")
    assert split_modes(here(tmp_path / "m", MAIN, SMALL, MOE).install) == ["layer", "row", "tensor"]


@pytest.mark.parametrize(
    ("name", "device", "settings", "allowed"),
    [
        ("llama.cpp", SMALL, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}, True),
        ("llama.cpp", SMALL, {"kv_type_v": "q8_0", "kv_type_k": "q8_0", "flash_attention": False}, False),
        ("llama.cpp", SMALL, {"kv_type_k": "q8_0"}, False),
        ("llama.cpp", {"kind": "cpu"}, {"kv_type_k": "q8_0"}, True),
        ("ik_llama.cpp", SMALL, {"kv_type_k": "q8_0", "kv_type_v": "q6_0"}, True),
        ("ik_llama.cpp", SMALL, {"placement": "exps=cpu", "n_cpu_moe": 8}, False),
        ("llama.cpp", SMALL, {"split_mode": "tensor"}, True),
        ("llama.cpp", SMALL, {"split_mode": "tensor", "kv_type_k": "q8_0", "kv_type_v": "q8_0"}, False),
    ],
)
def test_combinations(name: str, device: dict[str, Any], settings: dict[str, Any], allowed: bool) -> None:
    engine = {"name": name, "defaults": {"flash_attention": True, "kv_type_k": "f16", "kv_type_v": "f16"}}
    assert legal(engine, device)(settings) is allowed


@pytest.mark.parametrize(
    ("version", "settings", "bench", "common"),
    [
        (IK, {"kv_type_v": "q8_kv"}, ["-ctv", "q8_KV"], ["-ctv", "q8_KV"]),
        (MAIN, {"n_cpu_moe": 3}, ["-ncmoe", "3"], ["-ncmoe", "3"]),
        (IK, {"n_cpu_moe": 3}, ["--n-cpu-moe", "3"], ["-ncmoe", "3"]),
        ("llama.cpp-4227c9b", {"n_cpu_moe": 2}, ["-ot", r"blk\.(0|1)\.ffn_(up|down|gate)_exps=CPU"],
         ["-ncmoe", "2"]),
        (MAIN, {"placement": "a=cpu,b=cuda:1"}, ["-ot", "a=CPU;b=CUDA1"], ["-ot", "a=CPU,b=CUDA1"]),
        (IK, {"placement": ["a=cpu", "b=cuda:1"]}, ["-ot", "a=CPU,b=CUDA1"], ["-ot", "a=CPU,b=CUDA1"]),
        (MAIN, {"placement": "", "n_cpu_moe": 0}, [], []),
        (MAIN, {"cpu_repack": False}, ["--repack", "0"], ["-nr"]),
        (MAIN, {"cpu_repack": True}, ["--repack", "1"], []),
        (IK, {"cpu_repack": True}, ["-rtr", "1"], ["-rtr"]),
        (MAIN, {"split_mode": "row"}, ["-sm", "row"], ["-sm", "row"]),
        (IK, {"flash_attention": False}, ["-fa", "0"], ["-fa", "off"]),
        (IK, {"mla_mode": "absorbed", "attention_max_batch_mib": 512}, ["-mla", "1", "-amb", "512"],
         ["-mla", "1", "-amb", "512"]),
    ],
)  # fmt: skip
def test_spelling(version: str, settings: dict[str, Any], bench: list[str], common: list[str]) -> None:
    engine = version.rpartition("-")[0]
    assert spell(settings, engine, help_of(version, "bench"), bench=True).all_args() == bench
    assert spell(settings, engine, help_of(version, "common"), bench=False).all_args() == common


def test_rules_and_buffers() -> None:
    assert from_buffers("a=CPU,b=CUDA1") == "a=cpu,b=cuda:1"
    assert to_buffers("a=cpu,b=cuda:1") == "a=CPU,b=CUDA1"
    assert from_buffers("a=CUDA_Host") is None
    assert from_buffers("a") is None
    with pytest.raises(NoSpelling, match=r"split 'blk.\{1,2\}x' at its comma"):
        to_buffers("a=cpu,blk.{1,2}x=cuda:1")


def _parse(version: str, line: str) -> Any:
    engine = version.rpartition("-")[0]
    return parse_command(line.split(), help_of(version, "common"), help_of(version, "bench"), engine)


def test_command_lines_of_real_help() -> None:
    found = _parse(IK, "llama-sweep-bench -cuda graphs=0,mmq-id-size=8 -mla 3 -amb 512 -no-fa -rtr -ngl 99")
    assert found.incumbent == {
        "cuda_graphs": False, "mmq_id_size": 8, "mla_mode": "auto", "attention_max_batch_mib": 512,
        "flash_attention": False, "cpu_repack": True,
    }  # fmt: skip
    assert found.gpu_layers == 99
    assert _parse(IK, "llama-server -op 28,0,31,0 -fa on").policy == {28: False, 31: False}
    assert _parse(MAIN, "llama-server -kvo -nr -ngl all").bench == ["-ngl", "999"]
    assert _parse(MAIN, "llama-server -nkvo").bench == ["-nkvo", "1"]
    assert _parse(MAIN, "llama-server -nr").incumbent == {"cpu_repack": False}
    assert _parse(MAIN, "llama-server -cmoe").base == {"n_cpu_moe": 999}
    assert _parse(MAIN, "llama-server -ot a=CUDA_Host").bench == ["-ot", "a=CUDA_Host"]


@pytest.mark.parametrize(
    ("version", "line", "bench"),
    [
        (MAIN, "--no-op-offload", "-nopo 1"),
        (MAIN, "-lm none", "-lm none"),
        (MAIN, "--poll 0", "--poll 0"),
        (MAIN, "--prio 2", "--prio 2"),
        (MAIN, "-C 0x3", "-C 0x3"),
        (MAIN, "--cpu-strict 1", "--cpu-strict 1"),
        (MAIN, "--no-host", "--no-host 1"),
        (MAIN, "-fitt 1024 -fit off", ""),  # nothing is fitted in any run
        (IK, "-ger -muge -mqkv -thp", "-ger 1 -muge 1 -mqkv 1 -thp 1"),
        (IK, "--merge-up-gate-experts", "-muge 1"),  # llama-bench does not read the long name of its help
        (IK, "-no-fug -no-ooae -sas", "-no-fug 1 -no-ooae 1 -sas 1"),
        (IK, "-gr --defer-experts --max-gpu 2", "-gr 1 --defer-experts --max-gpu 2"),
        (IK, "-no-gr", "-gr 0"),
        (IK, "-ser 6,1 -mla 2", "-ser 6,1 -mla 2"),
    ],
)
def test_flags_that_llama_bench_has_go_along(version: str, line: str, bench: str) -> None:
    found = _parse(version, f"llama-server {line}")
    assert found.bench == bench.split()
    assert found.kept == line.split()
    assert not found.incumbent


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (MAIN, "--cache-ram 0 --slot-save-path x -sp --samplers a --repeat-penalty 1.1 --presence-penalty 1"),
        (
            MAIN,
            "--chat-template-kwargs {} --log-file x -lv 3 --threads-http 4 --context-shift --cache-reuse 8",
        ),
        (MAIN, "-e -kvu -rea off --no-context-shift --ctx-checkpoints 3 --no-slots --ui --grammar x -j x"),
        (IK, "-cram 0 --ctx-checkpoints 3 -ctx-ckpt 3 --webui none -vq --top-n-sigma 1 --context-shift off"),
    ],
)
def test_flags_that_only_serve_stay(version: str, line: str) -> None:
    found = _parse(version, f"llama-server {line}")
    assert found.kept == line.split()
    assert (found.bench, found.common, found.incumbent) == ([], [], {})


def test_further_cuda_parameters_go_along(tmp_path: Path, tiny_dir: Path) -> None:
    found = _parse(IK, "llama-server -cuda graphs=0,fa-offset=0.5,offload-batch-size-per-byte=2")
    assert found.incumbent == {"cuda_graphs": False}
    assert found.cuda == {"fa-offset": "0.5", "offload-batch-size-per-byte": "2"}
    both = spell({"fusion": True}, "ik_llama.cpp", help_of(IK, "bench"), bench=True, cuda=found.cuda)
    assert both.all_args() == ["-cuda", "fa-offset=0.5,offload-batch-size-per-byte=2,fusion=1"]
    model = str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))
    folder = fake(tmp_path / "b", IK, TOOLS)
    own = ["llama-server", "-cuda", "fa-offset=0.5", "-mqkv"]
    target = GgmlTarget("ik_llama.cpp", model, str(folder), command=own)
    target.apply(Configuration({"ubatch": 64}), OpContext("x"))
    target.measure(Workload(pp=128, tg=8, depth=128), "pp", 0)
    target.close()
    args = json.loads((folder / "swept.json").read_text())
    assert args[args.index("-cuda") + 1] == "fa-offset=0.5"
    assert "-mqkv" in args


def test_a_mode_of_latent_attention_that_no_setting_stands_for(tmp_path: Path) -> None:
    place = here(tmp_path, IK, H200, MLA, carried=frozenset(_parse(IK, "llama-server -mla 2").carried))
    assert "-mla 2" in refusal("mla_mode", place)


@pytest.mark.parametrize("suffix", ["sweep", "sweep.jsonl"])
def test_rows_of_the_sweep(suffix: str) -> None:
    rows = parse_rows("a log line\n" + (DATA / f"{IK}.{suffix}").read_text())
    assert [(r["n_kv"], r["pp"], r["tg"]) for r in rows] == [(64 * n, 64, 4) for n in range(4)]
    assert all(0.001 < r["t_pp"] < 1 and 0.001 < r["t_tg"] < 1 for r in rows)


def test_a_workload_in_steps() -> None:
    help_ = help_of(IK, "common")
    settings = {"ubatch": 64}
    plan = sweep("t", help_, "m", settings, Workload(pp=192, tg=4, depth=64), "pp", batch=2048, op_ids={})
    assert plan.command[:7] == ["t", "-m", "m", "-c", "256", "-n", "1"]
    text = (DATA / f"{IK}.sweep.jsonl").read_text()
    rows = parse_rows(text)
    assert plan.seconds(text) == pytest.approx(sum(r["t_pp"] for r in rows[1:]))
    with pytest.raises(NoSpelling, match="multiples of 64"):
        sweep("t", help_, "m", settings, Workload(pp=100, tg=0), "pp", batch=2048, op_ids={})


def test_a_policy_is_measured_by_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path
) -> None:
    """On a machine that is said to have a GPU: the user's numbers become names, an `-op` comes back."""
    monkeypatch.setattr(ggml_target, "cuda_device", lambda number: (dict(SMALL), "GPU"))
    model = str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))
    folder = fake(tmp_path / "b", IK, TOOLS)
    own = ["llama-server", "-ngl", "99", "-ot", "exps=CPU", "-op", "28,0,31,0", "-t", "4"]
    target = GgmlTarget("ik_llama.cpp", model, str(folder), gpu=[0], command=own, log=str(tmp_path / "log"))
    told = target.describe().engine
    assert told["bench"] == "llama-sweep-bench"
    assert told["incumbent"] == {"threads": 4, "op_offload.matmul_id": False, "op_offload.moe_up_gate": False}
    workload = Workload(pp=512, tg=8)
    rates = {}
    for name, settings in (("default", {}), ("own", told["incumbent"])):
        target.apply(Configuration(settings), OpContext("x"))
        rates[name] = target.measure(workload, "pp", 0).rate
    assert rates["default"] == pytest.approx(4e5)
    assert rates["own"] == pytest.approx(8e5)
    args = (folder / "swept.json").read_text()
    assert '"-op", "28,0,31,0"' in args
    assert '"-ot", "exps=CPU"' in args
    assert "exit code 0" in (tmp_path / "log").read_text()
    target.close()
    renumbered = ["llama-server", "-ngl", "99", "-ot", "exps=CPU", "-op", "26,0,27,0,29,0"]
    with pytest.raises(TargetUnusable, match="26 is MULTI_ADD in this binary"):
        GgmlTarget("ik_llama.cpp", model, str(folder), gpu=0, command=renumbered)
    with pytest.raises((TargetUnusable, TuneError), match="cannot be measured"):
        GgmlTarget("ik_llama.cpp", model, str(folder), command=["llama-server", "-op", "28,0"])


def test_what_is_not_searched_here_stays_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path
) -> None:
    monkeypatch.setattr(ggml_target, "cuda_device", lambda number: (dict(H200), "GPU"))
    model = str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))
    folder = fake(tmp_path / "b", MAIN, TOOLS)
    own = ["llama-server", "-t", "8", "-ub", "64"]
    target = GgmlTarget("llama.cpp", model, str(folder), gpu=0, command=own)
    told = target.describe()
    assert told.engine["incumbent"] == {"ubatch": 64}
    knobs = make_knobs(told.engine, told.model, Workload(pp=64, tg=8), approx=False)
    assert not {"threads", "threads_batch"} & {k.name for k in knobs}
    target.apply(Configuration({}), OpContext("x"))
    target.measure(Workload(pp=64, tg=8), "pp", 0)
    target.close()
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    (args,) = [c["args"] for c in lines if c["name"] == "llama-bench" and "-p" in c["args"]]
    assert args[args.index("-p") + 1 : args.index("-p") + 4] == ["64", "-n", "8"]  # one process for both
    assert args[args.index("-t") + 1] == "8"
    ik = str(fake(tmp_path / "i", OLD_IK))
    with pytest.raises(TargetUnusable, match="cannot be measured"):
        GgmlTarget("ik_llama.cpp", model, ik, gpu=0, command=["llama-server", "-op", "27,0"])


SERVED: dict[str, dict[str, Any]] = {
    "llama.cpp": {"graph_concurrency": True, "cpu_repack": False, "split_mode": "layer"},
    "ik_llama.cpp": {
        "fused_moe": False, "mmq_id_size": 0, "mla_mode": "expanded", "attention_max_batch_mib": 512,
        "cpu_repack": True, "op_offload.matmul_id": False, "split_mode": "graph",
    },
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_is_one_that_the_binary_lists(version: str) -> None:
    engine = version.rpartition("-")[0]
    settings = {
        "ubatch": 4096, "threads": 4, "threads_batch": 8, "flash_attention": True, "kv_type_k": "q8_0",
        "kv_type_v": "q8_0", "cuda_graphs": False, "fusion": False, "offload_min_tokens": 64,
        "n_cpu_moe": 2, **SERVED[engine],
    }  # fmt: skip
    if version == OLD_MAIN:
        settings["cpu_repack"] = True  # its own way: it has a flag for the opposite alone
    if version == OLD_IK:  # of a time without -cuda
        for name in ("mmq_id_size", "cuda_graphs", "fusion", "offload_min_tokens"):
            with pytest.raises(NoSpelling, match=rf"{name}.*-cuda"):
                spell({name: 1}, engine, help_of(version, "bench"), bench=True)
            del settings[name]
    for tool, bench in (("bench", True), ("common", False)):
        help_ = whole_help(version, tool)
        wanted = settings if not bench else {n: v for n, v in settings.items() if "." not in n}
        if version == OLD_MAIN and bench:
            del wanted["cpu_repack"]
        args = spell(wanted, engine, help_, bench=bench, op_ids={"MUL_MAT_ID": 28}).all_args()
        flags = [a for a in args if a.startswith("-")]
        unlisted = DATA / f"{version}.unlisted"
        also = set(unlisted.read_text().split()) if unlisted.exists() and not bench else set()
        assert len(flags) >= 8
        assert not [f for f in flags if f not in help_of(version, tool).flags and f not in also]


def test_a_depth_is_reached_by_the_sweep(tmp_path: Path, tiny_dir: Path) -> None:
    model = str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))
    folder = fake(tmp_path / "b", IK, TOOLS)
    target = GgmlTarget("ik_llama.cpp", model, str(folder))
    target.apply(Configuration({"ubatch": 64}), OpContext("x"))
    deep = Workload(pp=128, tg=8, depth=128)
    assert target.measure(deep, "pp", 0).rate == pytest.approx(4e5)
    args = json.loads((folder / "swept.json").read_text())
    assert args[args.index("-c") + 1] == "256"
    assert target.measure(deep, "tg", 0).rate == pytest.approx(8e4)
    args = json.loads((folder / "swept.json").read_text())
    assert args[args.index("--sweep-stride") + 1] == "2"
    target.close()
    alone = GgmlTarget("ik_llama.cpp", model, str(fake(tmp_path / "c", IK)))
    alone.apply(Configuration({}), OpContext("x"))
    with pytest.raises(TargetUnusable, match="no llama-sweep-bench"):
        alone.measure(deep, "pp", 0)
    alone.close()
