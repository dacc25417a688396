"""A target declares itself: what it can do, its knobs and its constraint. Nothing else knows its name."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import dyno_tuner
import pytest
from dyno_tuner.core.errors import TargetUnusable, TuneError
from dyno_tuner.core.protocol import (
    Capabilities,
    Configuration,
    Description,
    OpContext,
    Switch,
    Target,
    Workload,
)
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.run.session import Request, run, space_for, target_of
from dyno_tuner.run.tune import Options
from dyno_tuner.targets import MODULES, declared
from dyno_tuner.targets.declaration import TargetRequest
from dyno_tuner.targets.simulated.target import SimulatedTarget

TOY = {
    "__init__.py": "",
    "declaration.py": """
from dyno_tuner.space.knobs import Knob
from dyno_tuner.targets.declaration import Declaration


class Toy(Declaration):
    def knobs(self, description, workload, *, approx, held):
        names = [n for n in description.engine["defaults"] if n not in held]
        return tuple(Knob(n, (1, 2, 4, 8), 8, moves=frozenset({"pp", "tg"})) for n in names)

    def legal(self, description):
        return lambda settings: settings.get("threads", 8) in (1, 2, 4, 8)

    def worker_options(self, request):
        return {"best": request.options["best"], "name": request.model}


def declaration(engine):
    return Toy(engine)
""",
    "target.py": """
from dyno_tuner.core.protocol import Capabilities, Description, Quality, Sample, Switch, Target, TrialStatus


class Toy(Target):
    def __init__(self, best, name):
        self.best, self.name, self.now, self.processes = best, name, 0.0, []

    def describe(self):
        device = {"kind": "cpu", "isa": "portable", "cores": 8, "memory_mib": 1024}
        model = {"architecture": "toy", "layers": 1, "embedding": 1, "types": {"F32": 1.0}}
        model["weights"] = "synthetic"
        engine = {"version": "toy", "ops_revision": 0, "defaults": {"threads": 8}}
        return Description(
            "toy", self.name, device, model, engine, virtual_time=True, capabilities=self.capabilities()
        )

    def capabilities(self):
        return Capabilities(answers=False, switch=Switch.PROCESS)

    def apply(self, configuration, context):
        self.threads, self.now = configuration.settings["threads"], self.now + 0.1
        self.processes.append(context.process)

    def measure(self, workload, metric, prompt):
        tokens = workload.tokens(metric)
        seconds = tokens / (150.0 if self.threads == self.best else 100.0)
        self.now += seconds
        return Sample(metric, prompt, tokens, seconds, seconds)

    def rest(self, seconds):
        self.now += seconds

    def quality(self, configuration, context):
        raise AssertionError("it has said that answers cannot be compared")

    def clock(self):
        return self.now

    def close(self):
        pass


def from_options(options):
    return Toy(**options)
""",
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder and a line."""
    folder = tmp_path / "toy_target"
    folder.mkdir()
    for name, text in TOY.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MODULES, "toy", "toy_target.target")
    return "toy"


def test_a_new_target_is_a_folder_and_a_line(toy: str, tmp_path: Path) -> None:
    options = Options(Workload(pp=64, tg=8), seed=1, max_trials=8, rounds=2, max_rounds=2)
    request = Request("m.gguf", options, out=tmp_path / "p.yaml", quiet=True, engine=toy)
    request.engine_options = {"best": 2}
    name, given = target_of(request, "cpu", None)
    assert (name, given["best"], Path(given["name"]).name) == ("toy", 2, "m.gguf")
    target = importlib.import_module(MODULES[name]).from_options(given)
    assert [k.name for k in space_for(target.describe(), request).knobs] == ["threads"]
    result = run(request, InlineExecutor(target))
    assert {e.name: e.value for e in result.outcome.entries} == {"threads": 2}
    assert result.outcome.quality is None, "its answers are not asked for"
    request.held = {"threads": 8}
    assert space_for(target.describe(), request).knobs == ()


def test_the_constraint_of_a_target_holds(toy: str) -> None:
    description = Description("toy", "toy", {}, {}, {"defaults": {"threads": 8}})
    legal = declared(toy).legal(description)
    assert legal is not None
    assert [n for n in (1, 4, 6, 8) if legal({"threads": n})] == [1, 4, 8]


@pytest.mark.parametrize("name", MODULES)
def test_every_target_declares_itself(name: str) -> None:
    target = declared(name)
    options = target.worker_options(TargetRequest("/m.gguf", "cpu", 512, settings={"ubatch": 64}))
    assert options["model"] == "/m.gguf"
    assert options["settings"] == {"ubatch": 64}
    assert target.foreign == name.endswith("llama_cpp")
    assert target.verify_seconds == (600.0 if target.foreign else 120.0)
    assert not (target.foreign and target.memory_plan)


def test_an_unknown_target_is_named_with_those_that_there_are() -> None:
    with pytest.raises(TuneError, match=r"no target 'other'; choose from dyno, replay"):
        declared("other")


def test_the_context_of_our_engine_is_what_the_workload_takes() -> None:
    def context(**asked: Any) -> int:
        return int(declared("dyno").worker_options(TargetRequest("/m", **asked))["ctx"])

    assert context(longest=512) == 4096
    assert context(longest=9000) == 9000
    assert context(longest=512, ctx=1024) == 1024


def test_a_target_without_a_capability_says_so() -> None:
    executor, context = InlineExecutor(SimulatedTarget("null", 1)), OpContext("k")
    default = Configuration({})
    assert executor.routing(default, Workload(64, 8), context) == {}
    with pytest.raises(TargetUnusable, match="no memory plan"):
        executor.memory({})
    assert Target.kernel_ops(SimulatedTarget("null", 1), default, Workload(64, 8)) == []


def test_capabilities_cross_the_pipe() -> None:
    told = Description("t", "t", {}, {}, {}, capabilities=Capabilities(kernels=True, switch=Switch.PROCESS))
    there = Description.from_dict(json.loads(json.dumps(told.to_dict())))
    assert there == told
    assert there.capabilities.switch is Switch.PROCESS
    assert "capabilities" not in told.identity(), "a journal of before can be continued"


def test_no_stage_and_no_command_asks_for_an_engine_by_name() -> None:
    folder = Path(dyno_tuner.__file__).parent
    for package in ("run", "cli", "execution", "search", "decide", "kernels"):
        for path in sorted((folder / package).glob("*.py")):
            assert not re.search(r'[!=]= "(dyno|llama\.cpp|ik_llama\.cpp)"', path.read_text()), path
    for module in ("execution/inline_executor", "run/session", "run/verify", "cli/commands", "cli/arguments"):
        assert "getattr(" not in (folder / f"{module}.py").read_text(), (
            "a target or executor says what it can"
        )
