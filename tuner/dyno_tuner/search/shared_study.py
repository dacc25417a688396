"""A study in an Optuna storage that the tunes of several machines of one kind work on.

The storage distributes points and carries results. Each tune measures, proves and writes its profile itself.
A tune claims a point by adding a running trial. The database assigns the trial numbers. If two tunes claim
the same point, the lower number wins, and the other tune tries another point. Each access to the storage is
an operation of the recorder, so a resumed run finds it in its own journal.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
import uuid
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
import sqlalchemy
from dyno import profiles
from optuna.trial import TrialState

from ..core.errors import TuneError
from ..core.machine_match import differences, match_of
from ..core.protocol import TrialStatus, Workload
from ..core.redaction import redact_text
from ..measure.measurement import Score
from .observation import Observation, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ..core.protocol import Description
    from ..record.recorder import Recorder
    from ..space.search_space import Point, Space

# Seconds after which a claim without a result counts as abandoned.
FORGOTTEN = 900.0
_PREFIX = "dyno_"  # prefix of the attributes of a trial
# Drivers for a URL that names none, because the default of SQLAlchemy depends on its version.
_POSTGRESQL_DRIVERS = ("psycopg2", "psycopg")


@dataclass
class _Known:
    """A trial of another tune."""

    settings: dict[str, Any]
    status: str  # value of a TrialStatus; "running" until there is one
    log_ratio: float | None
    pairs: dict[str, list[float]]
    message: str


class Study:
    """A study in an Optuna storage that several tunes work on.

    Args:
    storage: URL that Optuna accepts.
    name: Name of the study, which is created if it does not exist.
    space: All points that may be tried. A tune that solves thresholds later leaves some out.
    """

    def __init__(self, storage: str, name: str, space: Space, recorder: Recorder) -> None:
        self._url = storage
        self._shown = redact_text(storage)
        self.name = name
        self._space = space
        self._recorder = recorder
        # Plain values, so that a dashboard can show them. Proposers use other distributions.
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            k.name: optuna.distributions.CategoricalDistribution(k.values) for k in space.knobs
        }
        self._opened: optuna.Study | None = None
        self._storage: optuna.storages.RDBStorage | None = None
        self._me = ""
        self._asked = 0  # number of operations so far
        self._mine: dict[Point, int] = {}  # claimed but unpublished points, with their trial numbers
        self._known: dict[int, _Known] = {}
        self._since: dict[int, float] = {}  # time at which a running trial of another tune was first seen
        self._told: dict[int, str] = {}  # states that are in the journal
        self._lost: dict[Point, None] = {}  # points that other tunes claimed first
        self.others = 0  # number of tunes that joined before this one
        self.alone = ""  # the reason why the storage is no longer used

    # ---- the storage

    def _do(self, op: str, key: str, perform: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Carry out an operation of the run. If the storage fails, the run continues alone. Only joining
        raises TuneError."""
        if self.alone:
            return {}

        def safely() -> dict[str, Any]:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    return perform()
            except TuneError:
                raise
            except Exception as error:  # whatever a database driver raises
                why = self._why(error)
                if op == "join":
                    raise TuneError(why) from error
                return {"alone": why}

        found = self._recorder.recall(op, key, safely)
        self.alone = str(found.get("alone", ""))
        if self.alone:
            self._recorder.note("storage", message=f"{self.alone}; this tune continues alone")
        return found

    def _why(self, error: Exception) -> str:
        """The text of an error. If its type is not one of a storage, the type is added, because it may be a
        fault of this program."""
        said = redact_text(" ".join(str(error).split()))
        usual = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError, OSError, ImportError)
        kind = "" if isinstance(error, usual) else f"{type(error).__name__}: "
        return f"storage {self._shown}: {kind}{said}"

    @property
    def _study(self) -> optuna.Study:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> optuna.Study:
        """Open the study. If two tunes create the tables of a new database at the same time, one fails, and
        finds the tables at its next attempt."""
        for pause in (0.5, 1.0, 2.0):
            try:
                return self._create()
            except sqlalchemy.exc.SQLAlchemyError:
                time.sleep(pause)
        return self._create()

    def _create(self) -> optuna.Study:
        if self._storage is None:
            self._storage = optuna.storages.RDBStorage(with_driver(self._url))
        return optuna.create_study(
            storage=self._storage, study_name=self.name, direction="maximize", load_if_exists=True
        )

    def close(self) -> None:
        """Close the connections to the storage. A later operation would open new ones."""
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()
        self._opened = self._storage = None

    def _add(self, state: TrialState, point: Point, value: float | None = None, **attributes: Any) -> None:
        self._study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=value,
                params={k.name: k.values[i] for k, i in zip(self._space.knobs, point, strict=True)},
                distributions=self._distributions,
                user_attrs={
                    "settings": {k: str(v) for k, v in self._space.settings(point).items()},
                    **{_PREFIX + name: value for name, value in attributes.items()},
                },
            )
        )

    # ---- joining

    def join(self, description: Description, terms: Mapping[str, Any]) -> None:
        """Add the default as a trial of this machine, with its properties.

        Args:
            terms: Further facts that must be the same for comparable rates: the workload, the knobs,
                versions.

        Raises:
            TuneError: The storage cannot be reached, or the study belongs to another kind of machine.
        """
        match = match_of(description).model_dump(mode="json", exclude_none=True)
        mine: dict[str, Any] = json.loads(json.dumps({"match": match, "terms": terms}))  # as it is read back

        def perform() -> dict[str, Any]:
            me = uuid.uuid4().hex
            self._check(self._founder(), description, mine)
            try:
                self._add(TrialState.COMPLETE, self._space.default, 1.0, machine=me, kind=mine)
            except ValueError as error:
                # The values have another range than the existing ones, because another tune was faster.
                self._check(self._founder(), description, mine)
                raise TuneError(f"study {self.name!r} has other knobs than this tune: {error}") from error
            self._check(self._founder(), description, mine)
            return {"machine": me, "machines": self._machines(), "news": self._news(me)}

        found = self._do("join", "study/join", perform)
        self._me = str(found["machine"])
        self.others = int(found["machines"]) - 1
        self._learn(found["news"])

    def _founder(self) -> Mapping[str, Any] | None:
        """The properties of the first machine of the study."""
        for trial in self._study.get_trials(deepcopy=False):
            kind = _said(trial).get("kind")
            if isinstance(kind, dict):
                return kind
        return None

    def _check(
        self, founder: Mapping[str, Any] | None, description: Description, mine: Mapping[str, Any]
    ) -> None:
        if founder is None:
            return
        try:
            differs = differences(profiles.Match(**founder["match"]), description)
        except (KeyError, TypeError, ValueError) as error:
            raise TuneError(
                f"study {self.name!r} in {self._shown} belongs to another version of tune; give --study NAME"
            ) from error
        begun = "by a machine of another kind" if differs else "for something else"
        theirs = founder.get("terms", {})
        for name in {**theirs, **mine["terms"]}:
            here, there = mine["terms"].get(name), theirs.get(name)
            if here != there:
                differs.append(_difference(name, there, here))
        if differs:
            raise TuneError(
                f"study {self.name!r} was begun {begun}, so this tune cannot join: "
                f"{'; '.join(differs)}; give --study NAME for another study"
            )

    # ---- what the others do

    def _news(self, me: str) -> list[dict[str, Any]]:
        """Trials of other tunes that are new or have changed their state."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            said = _said(trial)
            if said.get("machine") in (None, me) or "kind" in said:
                continue
            state = self._state(trial, said)
            if self._told.get(trial.number) == state:
                continue
            found.append(
                {
                    "number": trial.number, "state": state, "params": dict(trial.params),
                    "ratio": trial.value, "pairs": said.get("pairs", {}), "message": said.get("message", ""),
                }
            )  # fmt: skip
        return found

    def _machines(self) -> int:
        return sum("kind" in _said(t) for t in self._study.get_trials(deepcopy=False))

    def _state(self, trial: optuna.trial.FrozenTrial, said: Mapping[str, Any]) -> str:
        """The state of a trial: `running`, `free` (released or abandoned), or the published status."""
        if trial.state is TrialState.RUNNING:
            first = self._since.setdefault(trial.number, time.monotonic())
            return "running" if time.monotonic() - first < FORGOTTEN else "free"
        if said.get("released"):
            return "free"
        return str(said.get("status") or (TrialStatus.OK if trial.state is TrialState.COMPLETE else "free"))

    def _point(self, params: Mapping[str, Any]) -> Point:
        """The point of a trial. Raises KeyError or ValueError for a trial of another space."""
        return self._space.point({k.name: params[k.name] for k in self._space.knobs})

    def _learn(self, news: Sequence[Mapping[str, Any]]) -> None:
        for row in news:
            number, state = int(row["number"]), str(row["state"])
            self._told[number] = state
            try:
                point = self._point(row["params"])
                settings = self._space.settings(point)
                ratio = None if row["ratio"] is None else float(row["ratio"])
            except (KeyError, IndexError, TypeError, ValueError):
                continue  # a trial that another program has added
            if state == "free":
                self._known.pop(number, None)
                continue
            log_ratio = math.log(ratio) if state == TrialStatus.OK and ratio and ratio > 0 else None
            self._known[number] = _Known(settings, state, log_ratio, dict(row["pairs"]), str(row["message"]))

    def observations(self, space: Space, own: Sequence[Observation]) -> list[Observation]:
        """The trials of other tunes in `space`. Running ones count with the mean of the ended ones."""
        scores = [o.score for o in own if o.score is not None]
        lie = sum(scores) / len(scores) if scores else 0.0
        sigma = own[0].sigma if own else 0.01
        found = []
        for known in self._known.values():
            point = _within(space, known.settings)
            if point is not None:
                running = known.status == "running"
                found.append(Observation(point, lie if running else known.log_ratio, sigma))
        classes = {space.code_class(o.point) for o in found}
        for lost in self._lost:
            point = _within(space, self._space.settings(lost))
            if point is not None and space.code_class(point) not in classes:
                found.append(Observation(point, lie, sigma))
        return found

    def trials(self, space: Space) -> list[Trial]:
        """The ended trials of other tunes, with negative numbers."""
        found = []
        for number, known in self._known.items():
            point = _within(space, known.settings)
            if point is not None and known.status in list(TrialStatus):
                score = Score({m: tuple(p) for m, p in known.pairs.items()}) if known.pairs else None
                status = TrialStatus(known.status)
                found.append(Trial(-1 - number, point, status, known.log_ratio, score, known.message))
        return found

    # ---- what this one does

    def claim(self, settings: Mapping[str, Any]) -> bool:
        """Claim settings. Returns whether no other tune has tried them or is trying them. This also reads new
        trials."""
        point = self._space.point(settings)
        kind = self._space.code_class(point)
        self._asked += 1

        def perform() -> dict[str, Any]:
            token = uuid.uuid4().hex
            self._add(TrialState.RUNNING, point, machine=self._me, claim=token)
            trials = self._study.get_trials(deepcopy=False)
            own = next(t for t in trials if _said(t).get("claim") == token)
            news = self._news(self._me)
            taken = any(self._has(t, kind) for t in trials if t.number < own.number)
            if taken:
                self._end(own, TrialState.FAIL, None, released=True)
            return {"number": None if taken else own.number, "news": news}

        found = self._do("claim", f"study/claim/{self._asked}", perform)
        if self.alone:
            return True
        self._learn(found["news"])
        if found["number"] is None:
            self._lost[point] = None
            return False
        self._mine[point] = int(found["number"])
        return True

    def _has(self, trial: optuna.trial.FrozenTrial, kind: Hashable) -> bool:
        """Whether a valid older trial of another tune has the same code."""
        said = _said(trial)
        if said.get("machine") in (None, self._me) or "kind" in said or self._state(trial, said) == "free":
            return False
        return self._space.code_class(self._point(trial.params)) == kind

    def publish(self, settings: Mapping[str, Any], trial: Trial) -> None:
        """Publish the result of a claimed trial for other tunes."""
        point = self._space.point(settings)
        number = self._mine.pop(point, None)
        if number is None:
            return

        def perform() -> dict[str, Any]:
            own = next((t for t in self._study.get_trials(deepcopy=False) if t.number == number), None)
            good = trial.log_ratio is not None
            state = TrialState.COMPLETE if good else TrialState.FAIL
            value = math.exp(trial.log_ratio) if trial.log_ratio is not None else None
            said = {
                "status": str(trial.status), "message": trial.message,
                "pairs": {m: list(p) for m, p in trial.score.pairs.items()} if trial.score else {},
            }  # fmt: skip
            if own is None or own.state.is_finished():
                # This run released it before it was resumed, or the study was created again meanwhile.
                self._add(state, point, value, machine=self._me, **said)
            else:
                self._end(own, state, value, **said)
            return {}

        self._do("publish", f"study/publish/{number}", perform)

    def _end(
        self, own: optuna.trial.FrozenTrial, state: TrialState, value: float | None, **attributes: Any
    ) -> None:
        study = self._study
        trial = optuna.trial.Trial(study, own._trial_id)
        for name, content in attributes.items():
            trial.set_user_attr(_PREFIX + name, content)
        study.tell(trial, value, state, skip_if_finished=True)

    def release(self) -> str:
        """Release claimed but unmeasured points. This is not an operation of the run, but its end. Returns
        the reason of a failure, or ""."""
        if not self._mine or self.alone:
            return ""
        numbers = set(self._mine.values())
        try:
            for trial in self._study.get_trials(deepcopy=False):
                if trial.number in numbers and not trial.state.is_finished():
                    self._end(trial, TrialState.FAIL, None, released=True)
        except Exception as error:  # the result of the run does not depend on it
            return f"{self._why(error)}; points that this tune has not measured stay reserved for a while"
        return ""


def _difference(name: str, there: Any, here: Any) -> str:
    """The difference of a term between the study and this tune; for a mapping, the names that differ."""
    if name == "workload" and isinstance(there, dict):
        try:
            return f"its workload is {Workload.from_dict(there)}, here {Workload.from_dict(here)}"
        except (KeyError, TypeError, ValueError, TuneError):
            return "another workload"
    if isinstance(here, dict) and isinstance(there, dict):
        names = sorted(k for k in {**here, **there} if here.get(k) != there.get(k))
        return f"its {name} differ in {', '.join(names)}"
    return f"another {name} ({there}, here {here})"


def check_storage(url: str) -> None:
    """Check that a storage can be used, before a tune changes anything.

    Raises:
        TuneError: The text is not the URL of a database, its driver is not installed, or nothing answers.
    """
    shown = redact_text(url)
    advice = "give a URL such as sqlite:///tune.db or postgresql://user@host/db"
    try:
        engine = sqlalchemy.create_engine(with_driver(url))
        try:
            engine.connect().close()
        finally:
            engine.dispose()
    except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError) as error:
        raise TuneError(f"storage {shown}: not the URL of a database; {advice}") from error
    except Exception as error:  # whatever a database driver raises
        why = redact_text(" ".join(str(error).split()))
        raise TuneError(f"storage {shown}: {why}") from error


def with_driver(url: str) -> str:
    """`postgresql://…` with an installed driver. Other URLs are not changed.

    Raises:
        ImportError: There is none. The message says what to install.
    """
    scheme, separator, rest = url.partition("://")
    if scheme != "postgresql":
        return url
    for driver in _POSTGRESQL_DRIVERS:
        if importlib.util.find_spec(driver) is not None:
            return f"{scheme}+{driver}{separator}{rest}"
    raise ImportError("no driver for PostgreSQL is installed: pip install psycopg2-binary")


def _said(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """The attributes that a tune has written on a trial."""
    return {k.removeprefix(_PREFIX): v for k, v in trial.user_attrs.items() if k.startswith(_PREFIX)}


def _within(space: Space, settings: Mapping[str, Any]) -> Point | None:
    """The point of these settings; None if this run has ruled out one of the values."""
    try:
        point = space.point(settings)
    except ValueError:
        return None
    return point if space.legal(point) else None
