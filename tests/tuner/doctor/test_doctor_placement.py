"""A command line that places tensors, held against a model file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dyno_tuner.cli.commands import app
from dyno_tuner.doctor import Facts, Line, diagnose
from dyno_tuner.doctor.facts import gather
from dyno_tuner.doctor.line import IK, MAIN
from typer.testing import CliRunner

MODEL = Path(__file__).resolve().parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
GIB = 1 << 30


def model(layers: int = 24) -> Facts:
    """One with a GiB of experts in each layer, and 64 MiB of attention and as much of the rest."""
    tensors = [("token_embd.weight", GIB), ("output.weight", GIB)]
    for n in range(layers):
        tensors += [(f"blk.{n}.ffn_{w}_exps.weight", GIB // 4) for w in ("up", "gate")]
        tensors += [(f"blk.{n}.ffn_down_exps.weight", GIB // 2), (f"blk.{n}.ffn_gate_inp.weight", 1 << 20)]
        tensors += [(f"blk.{n}.ffn_norm.weight", 4096), (f"blk.{n}.attn_q.weight", GIB // 16)]
    return Facts(
        moe=True, experts=64, experts_used=8, layers=layers, tensors=tuple(tensors), vram_bytes=12 * GIB
    )


def said(line: Line, start: str) -> list[tuple[str, str]]:
    item = next(i for i in line.items if i.text.startswith(start))
    return [(str(note.status), note.text) for note in item.notes]


@pytest.mark.parametrize("engine", [MAIN, IK])
@pytest.mark.parametrize(
    ("words", "token", "status", "text"),
    [
        ("-ngl 99 -ot exp=CPU", "-ot", "does", "reads weights"),
        (
            "-ngl 99 -ot ffn_.*_xps=CPU",
            "-ot",
            "invalid",
            "matches no tensor of the model; the tensors have names",
        ),
        ("-ngl 99 -cmoe -ot exps=CPU", "-ot", "inert", "earlier rules decide about all 72 tensors"),
        (
            "-ngl 99 -ot ffn=CPU",
            "-ot",
            "invalid",
            "and also 48 others, which every token reads (ffn_gate_inp.weight",
        ),
        (r"-ngl 99 -ot blk\.1=CPU", "-ot", "invalid", "also matches layers 10, 11, 12"),
        ("-ngl 0", "-ngl", "does", "all layers and the output stay in host memory"),
        ("-ngl 99", "-ngl", "invalid", "14.52 GiB too large for 1 GPU of 12.00 GiB"),
        ("-ngl 99 -ncmoe 10", "-ngl", "invalid", "raise -ncmoe by 5 or more"),
        ("-ngl 99 -ncmoe 15", "-ngl", "does", "weights on the GPU: 11.52 GiB; in host memory: 16.00 GiB"),
        (
            "-ngl 99 -ncmoe 30",
            "-ncmoe",
            "inert",
            "30 is more than the 24 layers of the model: 24 does the same",
        ),
        ("-ncmoe 99", "-ncmoe", "inert", "99 is more than the 24 layers of the model"),
        ("-ngl 99 -ot blk=CUDA0 -cmoe", "-cmoe", "inert", "earlier rules decide"),
    ],
)
def test_what_a_line_does_to_a_model(engine: str, words: str, token: str, status: str, text: str) -> None:
    line = diagnose([f"llama-server -m x.gguf {words}"], engine=engine, facts=model())
    found = said(line, token)
    if text == "reads weights":  # nothing to complain about
        assert not any(kind == "invalid" for kind, _ in found), found
        return
    assert any(kind == status and text in what for kind, what in found), found


@pytest.mark.parametrize(
    ("engine", "words", "told", "host_mib"),
    [
        # llama.cpp counts the output as a layer.
        (MAIN, "-ngl 5", "20 of 24 layers stay in host memory; 25 moves all to the GPU", 20 * 1089 + 1024),
        (MAIN, "-ngl 24", "1 of 24 layers stay in host memory", 1089 + 1024),
        # ik_llama.cpp counts layers alone, and its output is on the GPU only with more than all of them.
        (IK, "-ngl 5", "19 of 24 layers and the output stay in host memory; 25 moves", 19 * 1089 + 2048),
        (IK, "-ngl 24", "the output stays in host memory; 25 moves all to the GPU", 2048),
        (IK, "-ngl 5 -sm none", "19 of 24 layers stay in host memory", 19 * 1089 + 1024),
    ],
)
def test_layers_are_counted_as_the_engine_does(engine: str, words: str, told: str, host_mib: int) -> None:
    found = said(diagnose([f"llama-server -m x.gguf {words}"], engine=engine, facts=model()), "-ngl")
    assert any(text.startswith(told) for _, text in found), found
    assert any(f"in host memory: {host_mib / 1024:.2f} GiB" in text for _, text in found), found


def test_without_a_model_nothing_is_held_against_one() -> None:
    line = diagnose(["llama-server -ngl 99 -ot nothing=CPU"], engine=MAIN)
    assert not any("matches no tensor" in text for _, text in said(line, "-ot"))


def test_memory_without_a_unit_is_wrong_usage() -> None:
    words = ["doctor", "--engine", "llama.cpp", "--vram"]
    done = CliRunner().invoke(app, [*words, "24", "--", "llama-server", "-ngl", "99"])
    said = " ".join(done.output.replace("│", " ").split())
    assert (done.exit_code, "--vram: '24' is 24 bytes; write 24GiB" in said) == (2, True), said
    assert CliRunner().invoke(app, [*words, "24GiB", "--", "llama-server", "-ngl", "99"]).exit_code == 0


def test_tensors_come_from_the_file() -> None:
    facts = gather(None, None, None, None, None, MODEL, "1MiB")
    assert facts.vram_bytes == 1 << 20
    names = dict(facts.tensors or ())
    assert names["blk.0.ffn_up_exps.weight"] > 0
    words = ["doctor", "--engine", "llama.cpp", "--json", "--model", str(MODEL), "--vram", "64KiB"]
    done = CliRunner().invoke(app, [*words, "--", "llama-server", "-ngl", "99", "-ot", "ffn_.*_exp=CPU"])
    assert done.exit_code == 1  # it does not fit
    texts = json.dumps(json.loads(done.stdout))
    assert "too large for 1 GPU" in texts
    assert "matches no tensor" not in texts
