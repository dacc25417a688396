"""The op contract, held over every family, variant and configuration.

Each candidate must give the float64 reference's answer within rounding, bit for bit the same again and on two
threads, write nothing outside of its outputs and change none of its inputs; on every instruction set that
this machine runs.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DynoError, UnsupportedError

from ops.cases import GENERATORS, all_cases, device
from ops.harness import Case, isas, launch

CASES = all_cases()
ISAS = isas()
DEVICES = [
    device(isa="portable", cores=1),
    device(isa="avx2", cores=4),
    device(isa="avx512_vnni", cores=2, l2_bytes=2 << 20),
    device(isa="avx512_vnni", cores=128, l3_bytes=256 << 20),
]

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def on_cpu(case: Case) -> bool:
    """Whether a CPU has kernels for it; fused launches and layouts of a GPU have none there."""
    return bool(_core.ops.candidates(case.family, case.desc))


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.family + ":" + case.id)


def one_per_family() -> list[Case]:
    """The last case of each family: none of the trivial ones."""
    return list({case.family: case for case in CASES if on_cpu(case)}.values())


cpu_case = pytest.mark.parametrize(
    "case", [case for case in CASES if on_cpu(case)], ids=lambda case: case.family + ":" + case.id
)


by_family = pytest.mark.parametrize("case", one_per_family(), ids=lambda case: case.family)


def test_every_family_has_cases() -> None:
    assert set(GENERATORS) == set(_core.ops.families())


@by_case
def test_every_case_runs_somewhere(case: Case) -> None:
    assert on_cpu(case) or _core.ops.candidates(case.family, case.desc, HOPPER, "legal")


@cpu_case
def test_every_candidate_is_right(case: Case) -> None:
    seed = zlib.crc32(case.id.encode())
    args, outputs, check = case.make(np.random.default_rng(seed))
    for isa in ISAS:
        configs = _core.ops.candidates(case.family, case.desc, {**_core.cpu_info(), "isa": isa})
        assert configs
        for config in configs:
            try:
                first = launch(case, config, args, outputs, isa=isa)
                check(first)
                again = launch(case, config, args, outputs, threads=2, isa=isa)
                for name, value in first.items():
                    np.testing.assert_array_equal(
                        again[name].view(np.uint8), value.view(np.uint8), err_msg=f"{name} on 2 threads"
                    )
            except AssertionError as error:
                error.add_note(f"{case.family} {case.desc} with {config} on {isa}, seed {seed}")
                raise


@by_case
def test_candidates_are_stable_supported_and_hold_the_default(case: Case) -> None:
    for machine in DEVICES:
        legal = _core.ops.candidates(case.family, case.desc, machine, "legal")
        compiled = _core.ops.candidates(case.family, case.desc, machine, "compiled")
        assert compiled == _core.ops.candidates(case.family, case.desc, machine, "compiled")
        assert all(config in legal for config in compiled)
        assert len({tuple(config.items()) for config in legal}) == len(legal)
        for config in legal:
            assert _core.ops.supports(case.family, case.desc, config, machine) == (True, "")
        if legal:
            assert _core.ops.default_config(case.family, case.desc, machine) in compiled


@by_case
def test_key_round_trips(case: Case) -> None:
    key = _core.ops.op_key(case.family, case.desc)
    family, desc = _core.ops.parse_key(key, tokens=case.desc["m"])
    assert family == case.family
    assert _core.ops.op_key(family, desc) == key
    tiles = {name: 0 for name in ("x_tiles", "y_tiles", "out_tiles") if name in case.desc}  # not in the key
    assert {name: desc[name] for name in case.desc} == case.desc | tiles


@by_family
def test_key_leaves_out_the_tokens(case: Case) -> None:
    keys = {_core.ops.op_key(case.family, {**case.desc, "m": m}) for m in (1, 2, 512)}
    assert len(keys) == 1


@by_case
def test_cost_is_positive_and_grows_with_the_tokens(case: Case) -> None:
    few = _core.ops.cost(case.family, case.desc)
    many = _core.ops.cost(case.family, {**case.desc, "m": 4 * case.desc["m"]})
    assert many[0] > few[0] > 0
    assert many[1] > few[1] > 0 or many[1] == few[1] == 0  # moving rows computes nothing


@by_family
def test_foreign_configurations_are_refused_with_the_reason(case: Case) -> None:
    config = _core.ops.default_config(case.family, case.desc)
    ok, reason = _core.ops.supports(case.family, case.desc, config, {"kind": "cuda"})
    assert not ok
    assert "cuda" in reason
    for name in set(config) - {"variant"}:
        ok, reason = _core.ops.supports(case.family, case.desc, {**config, name: 31_999})
        assert not ok
        assert f"{name}=31999" in reason


@by_family
def test_bad_shapes_are_refused_with_the_value(case: Case) -> None:
    config = _core.ops.default_config(case.family, case.desc)
    for name, value in case.desc.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        ok, reason = _core.ops.supports(case.family, {**case.desc, name: -3}, config)
        assert not ok, name
        assert "-3" in reason


@by_family
def test_unsupported_configurations_do_not_launch(case: Case) -> None:
    args, outputs, _ = case.make(np.random.default_rng(0))
    config: dict[str, Any] = _core.ops.default_config(case.family, case.desc)
    for name in set(config) - {"variant"}:
        with pytest.raises(UnsupportedError, match=f"{name}=31999"):
            launch(case, {**config, name: 31_999}, args, outputs)


@by_family
def test_missing_unknown_and_short_arguments_are_errors(case: Case) -> None:
    args, outputs, _ = case.make(np.random.default_rng(0))
    name, array = next(iter(outputs.items()))
    with pytest.raises(DynoError, match=f"{name} is missing"):
        launch(case, None, args, {other: value for other, value in outputs.items() if other != name})
    with pytest.raises(DynoError, match="unknown argument 'extra'"):
        launch(case, None, {**args, "extra": 1}, outputs)
    with pytest.raises(DynoError, match=f"{name} has"):
        launch(case, None, args, {**outputs, name: array.reshape(-1)[:1].copy()})
