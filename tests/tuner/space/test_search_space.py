from __future__ import annotations

import numpy as np
import pytest
from dyno.settings import SETTINGS
from dyno_tuner.core.protocol import Configuration, KernelChoice, Workload
from dyno_tuner.space.knobs import KNOBS, Facts, Fidelity, Kind, Knob, resolve
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.simulated.surfaces import SURFACES, crossover

CPU = {"kind": "cpu", "isa": "avx2", "cores": 6, "memory_mib": 16000}
DEFAULTS = {
    "ubatch": 512, "threads": 6, "threads_batch": 6, "cpu_repack": True, "kv_type_k": "f16",
    "kv_type_v": "f16", "numerics": "default", "ctx": 4096,
}  # fmt: skip


def _resolve(
    approx: bool = False, workload: Workload | None = None, held: tuple[str, ...] = (), **device: object
):
    facts = Facts({**CPU, **device}, {"architecture": "llama"}, workload or Workload(), DEFAULTS)
    return {k.name: k for k in resolve(facts, approx=approx, held=held)}


def test_the_knobs_of_a_cpu() -> None:
    knobs = _resolve()
    assert list(knobs) == ["ubatch", "threads", "threads_batch", "cpu_repack"]
    assert knobs["threads"].values == (1, 2, 3, 4, 6)
    assert knobs["ubatch"].values == (32, 64, 128, 256, 512)
    assert knobs["threads"].moves == {"tg"}
    assert knobs["threads"].fidelity is Fidelity.EXACT
    assert knobs["ubatch"].fidelity is Fidelity.ROUNDING
    assert knobs["cpu_repack"].kind is Kind.LOAD
    assert not knobs["cpu_repack"].ordinal


def test_what_changes_answers_is_searched_only_where_allowed() -> None:
    assert not {"kv_type_k", "kv_type_v"} & set(_resolve())
    assert {"kv_type_k", "kv_type_v"} <= set(_resolve(approx=True))


def test_what_does_not_apply_or_is_held_is_left_out() -> None:
    one = Facts({**CPU, "cores": 1}, {}, Workload(), {**DEFAULTS, "threads": 1, "threads_batch": 1})
    assert not {"threads", "threads_batch"} & {k.name for k in resolve(one, approx=False)}
    assert "threads" not in _resolve(workload=Workload(pp=512, tg=0))
    assert not {"ubatch", "threads_batch"} & set(_resolve(workload=Workload(pp=0, tg=16)))
    assert "ubatch" not in _resolve(held=("ubatch",))


def test_a_ubatch_beyond_the_prompt_runs_as_the_prompt_does() -> None:
    knob = _resolve(workload=Workload(pp=100, tg=0))["ubatch"]
    assert 512 in knob.values  # the default is always there
    assert knob.code is not None
    assert knob.code(128, {}) == knob.code(512, {}) != knob.code(64, {})


def test_every_row_of_the_table_is_a_setting() -> None:
    for row in KNOBS:
        assert row.name in SETTINGS


def test_a_knob_checks_itself() -> None:
    with pytest.raises(ValueError, match="default 3"):
        Knob("x", (1, 2), 3)
    with pytest.raises(ValueError, match="twice"):
        Knob("x", (1, 1), 1)


@pytest.mark.parametrize("name", sorted(SURFACES))
def test_points_classes_and_neighbours_of_every_surface(name: str) -> None:
    space = SURFACES[name]().space()
    points = list(space.points())
    assert len(points) == len(set(points)) == len(space)
    classes = space.classes()
    assert set(classes) == {space.code_class(p) for p in points}
    assert space.default in classes.values()
    rng = np.random.default_rng(0)
    for _ in range(20):
        point = space.random(rng)
        assert space.point(space.settings(point)) == point
        assert len(space.features(point)) == len(space.feature_groups())
        for other in space.neighbours(point):
            assert sum(i != j for i, j in zip(point, other, strict=True)) == 1


def test_settings_that_run_the_same_code_are_one() -> None:
    space = crossover().space()
    assert len(space.classes()) < len(space)
    a = space.point({"ubatch": 512, "mmq_id_max_tokens": 512, "fusion": True, "cuda_graphs": True})
    b = space.point({"ubatch": 512, "mmq_id_max_tokens": 16384, "fusion": True, "cuda_graphs": True})
    c = space.point({"ubatch": 512, "mmq_id_max_tokens": 256, "fusion": True, "cuda_graphs": True})
    assert space.code_class(a) == space.code_class(b) != space.code_class(c)


def test_kernels_belong_to_what_a_configuration_is() -> None:
    space = crossover().space()
    plain = space.configuration(space.default)
    choice = KernelChoice("matmul q4_0 n=8 k=32", "m1", {"variant": "rows", "rows": 4})
    assert space.identity(plain) != space.identity(Configuration(plain.settings, (choice,)))


def test_an_illegal_default_is_refused_and_illegal_points_are_never_met() -> None:
    knobs = (Knob("a", (1, 2, 3), 1), Knob("b", (1, 2, 3), 1))
    with pytest.raises(ValueError, match="default settings"):
        Space(knobs, lambda s: int(s["a"]) > 1)
    space = Space(knobs, lambda s: int(s["a"]) <= int(s["b"]))
    assert len(list(space.points())) == 6
    rng = np.random.default_rng(0)
    assert all(space.legal(space.random(rng)) for _ in range(50))
    assert all(space.legal(p) for p in space.neighbours(space.default))


def test_workload_texts() -> None:
    assert Workload.parse("pp=4096,tg=128,depth=0") == Workload(4096, 128, 0)
    assert Workload.parse(" tg = 7 ") == Workload(512, 7, 0)
    for bad in ("", "pp", "pp=x", "pp=-1", "xx=3", "pp=1,pp=2", "pp=0,tg=0", "pp=99999999999"):
        with pytest.raises(Exception, match="workload"):
            Workload.parse(bad)
