"""`dyno profiles match`: nodes by their descriptions, without a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno.cli import app
from dyno.errors import ProfileError
from dyno.fleet import PRODUCTS, find_product, read_nodes
from dyno.profiles import CpuDevice, CudaDevice
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "qwen3moe-30b-a3b-Q4_0.gguf"


def labels(product: str = "NVIDIA-H200", memory: int = 143771, **more: str) -> dict[str, str]:
    return {
        "kubernetes.io/hostname": "n1",
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": str(memory),
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/cuda.driver.major": "580",
        "nvidia.com/cuda.driver.minor": "95",
        "nvidia.com/cuda.driver.rev": "05",
        **{f"nvidia.com/{k}": v for k, v in more.items()},
    }


def smi(
    product: str = "NVIDIA H200", memory: str = "143771 MiB", power: str = "", mig: str = "Disabled"
) -> str:
    watts = (
        power
        or "<gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings>"
    )
    gpu = (
        f"<gpu id='x'><product_name>{product}</product_name>"
        f"<mig_mode><current_mig>{mig}</current_mig></mig_mode>"
        f"<fb_memory_usage><total>{memory}</total><used>1 MiB</used></fb_memory_usage>{watts}</gpu>"
    )
    doctype = '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">'
    return f"{doctype}<nvidia_smi_log><driver_version>580.95.05</driver_version>{gpu}{gpu}</nvidia_smi_log>"


def run(*words: str, given: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["profiles", "match", *words], input=given)
    said = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
    return done.exit_code, done.output + said


# ---- descriptions ----


def test_labels_in_every_form_are_the_same_node() -> None:
    plain = "\n".join(f"{k}={v}" for k, v in labels().items())
    node = {"kind": "Node", "metadata": {"name": "n1", "labels": labels()}, "spec": {}}
    yaml = "kind: Node\nmetadata:\n  name: n1\n  labels:\n" + "".join(
        f'    {k}: "{v}"\n' for k, v in labels().items()
    )
    listed = json.dumps({"kind": "List", "items": [node, node]})
    forms = [plain, json.dumps(node), json.dumps(labels()), yaml]
    found = [read_nodes(text, "n1") for text in forms]
    assert all(nodes == found[0] for nodes in found)
    (one,) = found[0]
    assert (one.name, one.count, one.driver) == ("n1", 8, "580.95.05")
    assert one.device == CudaDevice(
        compute_capability="9.0", sm_count=132, memory_mib=143771, power_limit_w=700
    )
    assert len(read_nodes(listed, "fleet")) == 2


def test_what_labels_do_not_tell_is_named() -> None:
    (node,) = read_nodes(json.dumps(labels()), "n1")
    assert any("132 SMs" in a for a in node.assumed)
    assert any("power limit 700 W" in a for a in node.assumed)


def test_an_unknown_card_has_no_device_but_a_reason() -> None:
    (node,) = read_nodes(json.dumps(labels("NVIDIA-H900")), "n1")
    assert node.device is None
    assert "SM count of NVIDIA-H900 cannot be determined" in node.problem


def test_a_slice_takes_its_multiprocessors_from_the_labels() -> None:
    given = labels("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 9728, **{"gpu.multiprocessors": "14"})
    (node,) = read_nodes(json.dumps(given), "n1")
    assert isinstance(node.device, CudaDevice)
    assert (node.device.sm_count, node.device.memory_mib, node.device.power_limit_w) == (14, 9728, None)


def test_mixed_slices_are_kinds_of_their_own() -> None:
    given = labels(
        "NVIDIA-H100-80GB-HBM3", 81559,
        **{"mig-1g.10gb.count": "2", "mig-1g.10gb.memory": "9856", "mig-1g.10gb.multiprocessors": "16",
           "mig-3g.40gb.count": "1", "mig-3g.40gb.memory": "40448", "mig-3g.40gb.multiprocessors": "60"},
    )  # fmt: skip
    found = {n.title: n for n in read_nodes(json.dumps(given), "n1")}
    assert {n.device.sm_count for n in found.values() if isinstance(n.device, CudaDevice)} == {132, 16, 60}
    assert found["NVIDIA-H100-80GB-HBM3-MIG-1G.10GB"].count == 2


def test_smi_of_two_cards() -> None:
    (node,) = read_nodes(smi(), "n1")
    assert (node.count, node.driver) == (2, "580.95.05")
    assert node.device == CudaDevice(
        compute_capability="9.0", sm_count=132, memory_mib=143771, power_limit_w=700
    )
    old = "<power_readings><enforced_power_limit>500.00 W</enforced_power_limit></power_readings>"
    (capped,) = read_nodes(smi(power=old), "n1")
    assert isinstance(capped.device, CudaDevice)
    assert capped.device.power_limit_w == 500
    (parted,) = read_nodes(smi(mig="Enabled"), "n1")
    assert parted.device is None
    assert "MIG" in parted.problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "n1: empty"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("- a\n- b\n", "neither labels"),
        ("a: &x 1\nb: *x\n", "n1"),
        ("<html></html>", "the root element is <html>"),
        ("<nvidia_smi_log>", "not XML"),
        ("<nvidia_smi_log></nvidia_smi_log>", "lists no GPU"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><nvidia_smi_log></nvidia_smi_log>', "entities"),
        ('{"devices": []}', "lists no device"),
        ('{"devices": [{"kind": "cuda"}]}', "not the output of `dyno info --json`"),
        ('{"devices": [3]}', "not the output of `dyno info --json`"),
        ('{"devices": [{"kind": "cuda", "memory_bytes": 1e999}]}', "not the output of `dyno info --json`"),
        (json.dumps(labels(memory=-5)), "expected a whole number"),
        (
            json.dumps(labels(**{"gpu.multiprocessors": "132000"})),
            "sm_count of NVIDIA-H200 must be at most 4096, not 132000",
        ),
        (
            json.dumps(labels(**{"gpu.compute.major": "900"})),
            "compute_capability of NVIDIA-H200 must match",
        ),
    ],
)  # fmt: skip
def test_bad_descriptions_are_errors_that_name_the_file(text: str, said: str) -> None:
    with pytest.raises(ProfileError) as error:
        read_nodes(text, "n1")
    assert said in str(error.value)
    assert "n1" in str(error.value)


def test_a_description_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(ProfileError, match=f"{file} is not UTF-8 text"):
        CliRunner().invoke(app, ["profiles", "match", "--labels", str(file)], catch_exceptions=False)
    done = CliRunner().invoke(app, ["profiles", "match", "--labels", "-"], input=b"\xff\xfe{")
    assert str(done.exception) == "[fleet] standard input is not UTF-8 text"


def test_info_of_this_program_is_read_back() -> None:
    done = CliRunner().invoke(app, ["info", "--json"])
    nodes = read_nodes(done.output, "here")
    assert all(node.device is not None for node in nodes)
    assert {n.device.kind for n in nodes if n.device} <= {"cpu", "cuda"}


def test_products_are_found_by_label_and_by_name() -> None:
    for name in ("NVIDIA-GeForce-RTX-3090", "NVIDIA GeForce RTX 3090", "GeForce-RTX-3090"):
        found = find_product(name)
        assert found is not None
        assert (found.capability, found.sm_count) == ("8.6", 82)
    assert find_product("NVIDIA-GeForce-RTX-3090-Ti") != find_product("NVIDIA-GeForce-RTX-3090")
    assert find_product("GeForce GT 710") is None
    assert len(PRODUCTS) > 30


# ---- matching ----


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        (json.dumps(labels()), 0, "exact"),
        (smi(), 0, "exact"),
        (smi(power="<power_readings><power_limit>500.00 W</power_limit></power_readings>"), 3, "near"),
        (json.dumps(labels("NVIDIA-H100-80GB-HBM3", 81559)), 3, "near"),
        (json.dumps(labels("NVIDIA-H900")), 4, "none"),
        (json.dumps({"kubernetes.io/hostname": "n1"}), 4, "none"),
    ],
)  # fmt: skip
def test_exit_codes_of_shipped_profiles(text: str, code: int, word: str) -> None:
    given, output = run("--labels", "-", given=text)
    assert given == code, output
    assert f"{word:5}  {MODEL}" in output


def test_the_model_decides(trained_model: Path, tmp_path: Path) -> None:
    code, output = run("--labels", "-", "--model", str(trained_model), given=json.dumps(labels()))
    assert code == 4
    assert "profiles of other models" in output
    given = {"devices": [_cpu("avx512_vnni", 2)]}
    code, output = run("--labels", "-", "--model", str(trained_model), "--json", given=json.dumps(given))
    row = json.loads(output)["nodes"][0]
    assert row["model"] == trained_model.name
    assert (code, row["match"]) == (0, "exact"), output
    given = {"devices": [_cpu("avx512_vnni", 16)]}
    code, output = run("--labels", "-", "--model", str(trained_model), "--json", given=json.dumps(given))
    assert (code, json.loads(output)["nodes"][0]["match"]) == (3, "near")
    assert "cores 2, here 16" in json.loads(output)["nodes"][0]["why"]


def test_without_a_description_the_answer_is_for_this_machine(trained_model: Path, tmp_path: Path) -> None:
    info = tmp_path / "here.json"
    info.write_text(CliRunner().invoke(app, ["info", "--json"]).output)
    described = run("--labels", str(info), "--model", str(trained_model))
    assert (
        run(str(trained_model), "--model", str(trained_model)) == described
    )  # a model given twice counts once
    assert described[0] in (0, 3, 4)
    assert described[1].count(trained_model.name) == 1


def test_reasons_are_short_unless_verbose(trained_model: Path) -> None:
    near = json.dumps({"devices": [_cpu("avx512_vnni", 16)]})
    _, output = run("--labels", "-", str(trained_model), given=near)
    head, differs = output.splitlines()
    assert "(shipped; nearest device)" in head
    assert differs == "       differs: cores 2, here 16"
    _, output = run("--labels", "-", str(trained_model), "-v", given=near)
    assert "same instruction set and cores: none" in output
    code, output = run("--labels", "-", str(trained_model), given=json.dumps(labels()))
    assert code == 4
    assert "the engine's defaults" in output.splitlines()[0]
    assert not any(line.endswith(": none") for line in output.splitlines())


def _cpu(isa: str, cores: int) -> dict[str, Any]:
    shipped = next(
        item.profile.match.device
        for item in profiles.list_profiles()
        if item.profile is not None and item.layer == "shipped" and item.profile.match.device.kind == "cpu"
    )
    assert isinstance(shipped, CpuDevice)
    sizes = {f"{c}_bytes": (getattr(shipped, f"{c}_kib") or 0) << 10 for c in ("l1d", "l2", "l3")}
    memory = shipped.memory_mib << 20
    return {"kind": "cpu", "name": "a CPU", "isa": isa, "cores": cores, "memory_bytes": memory, **sizes}


def test_a_mixed_fleet_is_a_table_with_what_to_tune_next(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(labels()))
    (tmp_path / "b.xml").write_text(smi("NVIDIA GeForce RTX 3090", "24576 MiB"))
    (tmp_path / "c.labels").write_text(
        "\n".join(f"{k}={v}" for k, v in labels("NVIDIA-H100-NVL", 95830).items())
    )
    (tmp_path / "notes.md").write_text("no description")
    code, output = run("--all", str(tmp_path))
    assert code == 4, output
    lines = output.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("a ") and MODEL in line]
    assert row[:6] == ["a", "8", "×", "NVIDIA-H200", MODEL, "exact"]
    nexts = [line for line in lines if line[:1].isdigit() and line[1:3] == ". "]
    assert "runs with defaults" in nexts[0]
    code, output = run("--all", str(tmp_path), "--json")
    told = json.loads(output)
    assert {row["node"] for row in told["nodes"]} == {"a", "b", "c"}
    assert told["exit_code"] == 4
    orders = [(t["near"], -t["devices"]) for t in told["tune_next"]]
    assert orders == sorted(orders)
    assert not any(t["product"] == "NVIDIA-H200" for t in told["tune_next"] if t["model"] == MODEL)


def test_a_folder_of_profiles_replaces_the_usual_ones(tmp_path: Path) -> None:
    code, output = run("--labels", "-", "--profiles", str(tmp_path), given=json.dumps(labels()))
    assert code == 1
    assert "give one with --model" in output
    code, output = run("--labels", "-", "--profiles", str(tmp_path / "absent"), given=json.dumps(labels()))
    assert "is not a folder" in output


def test_wrong_usage() -> None:
    code, output = run("--labels", "-", "--all", ".", given="")
    assert (code, "give one of them" in " ".join(output.replace("│", " ").split())) == (2, True), output
    assert run("--all", "/nonexistent-folder")[0] == 1
    code, output = run("--labels", "/tmp")
    assert code == 2
    assert "--all takes a folder" in " ".join(output.replace("│", " ").split())
