"""Conversion of an Outcome to the profile that the runtime reads."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno._setting import split_rules
from dyno._shell import shell_word
from dyno.settings import SETTINGS

from .. import __version__
from ..core.errors import TuneError
from ..core.machine_match import device_of, engine_of, model_of
from ..core.options import SPEED
from ..core.recorded_command import held_pairs
from ..core.workload import Part, Workload, kind_of

if TYPE_CHECKING:
    import datetime
    from collections.abc import Mapping, Sequence

    from ..core.intervals import Estimate, Noise
    from ..core.outcome import Outcome
    from ..core.protocol import Description, Value


MIB = 2**20


@dataclass(frozen=True)
class Made:
    """The facts of a run for a profile, in addition to the outcome."""

    workload: Workload
    seed: int
    command: str
    journal_sha256: str | None
    model_file: str
    date: datetime.date
    slice: Mapping[str, Any] | None = None  # slice of the model on which the values were found


def profile_of(
    outcome: Outcome, description: Description, made: Made, rates: Mapping[str, float] | None = None
) -> profiles.Profile:
    """The profile of an outcome. It never fails because of a measured or external value.

    Text is cleaned. Numbers that a profile cannot hold are limited to its range or left out.

    Raises:
        pydantic.ValidationError: A fault of the tuner itself, because all other values come from its tables.
    """
    return profiles.Profile(
        schema=1,
        label=profiles.clean_text(description.label),
        match=profiles.Match(
            device=device_of(description, rates or {}),
            model=model_of(description),
            engine=engine_of(description),
        ),
        settings=_settings(outcome),
        kernels=_kernels(outcome),
        evidence=_evidence(outcome, description, made),
        provenance=profiles.Provenance(
            tuner=__version__,
            engine_commit=_text(description.engine.get("commit"), profiles.MAX_NAME),
            device_name=_text(description.engine.get("device_name")),
            compiler=_text(description.engine.get("compiler")),
            driver=_text((description.engine.get("gpu") or {}).get("driver")),
            cuda=_text((description.engine.get("gpu") or {}).get("cuda")),
            os=_text(f"{platform.system()} {platform.release()}"),
            date=made.date.isoformat(),
            model_file=_text(made.model_file),
            command=_text(made.command, profiles.MAX_COMMAND),
            seed=made.seed,
            trials=outcome.trials,
            failed_trials=len(outcome.failures),
            seconds=round(outcome.seconds, 1),
            status=outcome.status,  # type: ignore[arg-type]
        ),
    )


_EXPORT = "Use: dyno profiles export THIS_FILE (prints the command line of llama-server)"


def _use(profile: profiles.Profile, *, searched: bool) -> str:
    """The comment line about the use of a profile; empty for an engine without a known use."""
    match, evidence = profile.match, profile.evidence
    if match.engine.name in ("llama.cpp", "ik_llama.cpp"):
        return _EXPORT
    if match.engine.name != "dyno":
        return ""
    served = evidence is not None and (evidence.workload.name or "").startswith("serve:")
    line = f"Use: dyno {'serve' if served else 'run'} --model MODEL.gguf --profile THIS_FILE"
    line += "".join(f" --set {shell_word(pair)}" for pair in held_pairs(profile))
    if match.device.kind == "cpu" and match.device.virtual:
        line += " and the --virtual-device of the tune"
    return line + " (without --profile, dyno takes it only from your profile folder)" if searched else line


GENERATED = ("A profile: ", "Made by: ", "Verdict: ", "Other programs used ", "Use: ", "Check: ")
"""The beginnings of the lines of `comments_of`, which distinguish them from comments of people."""


def comments_of(profile: profiles.Profile, verdict: str, *, searched: bool = True) -> list[str]:
    """The comment lines at the top of the file of a profile. No program reads them.

    Args:
        verdict: The result of the tune in one sentence.
        searched: Whether the file may be in the profile folder, which the runtime searches.
    """
    lines = ["A profile: settings and kernels for one model on one device, measured against the defaults."]
    if profile.provenance and profile.provenance.command:
        lines.append(f"Made by: {profile.provenance.command}")
    lines.append(f"Verdict: {verdict}")
    if profile.disturbed:
        lines.append("Other programs used the machine during the tune (--force): tune again when it is quiet")
    if use := _use(profile, searched=searched):
        lines.append(use)
    lines.append("Check: tune verify THIS_FILE (measures whether each entry still gains)")
    return lines


def _text(value: object, limit: int = profiles.MAX_TEXT) -> str | None:
    """Foreign text in a form that a profile can hold; None if it is empty."""
    return profiles.clean_text(str(value), limit) or None if value else None


_LEAST_RATIO, _MOST_RATIO = 1e-4, 1e6
"""The range of a ratio in a profile. Intervals of few samples can exceed it."""


def _rate(rate: float) -> float:
    """Tokens per second with two decimals, or more for a very slow model."""
    return round(rate, 2) or float(f"{rate:.3g}")


def _joules(joules: float) -> float:
    return float(f"{joules:.4g}")


def _ratio(estimate: Estimate) -> dict[str, Any]:
    """A ratio with four digits, rounded so that it stays within its interval. NaN is left out."""

    def bounded(value: float) -> float:
        return round(min(max(value, _LEAST_RATIO), _MOST_RATIO), 4)

    written: dict[str, Any] = {"n": max(1, estimate.n)}
    if math.isnan(estimate.ratio):
        return written
    written["ratio"] = ratio = bounded(estimate.ratio)
    if not (math.isnan(estimate.low) or math.isnan(estimate.high)):
        written["ci95"] = (min(ratio, bounded(estimate.low)), max(ratio, bounded(estimate.high)))
    return written


_NO_DIVERGENCE = 1e-12
"""Nats per token. Float32 logits cannot show a smaller divergence, which would be rounding noise."""


def _digits(divergence: float) -> float:
    """A divergence with three significant digits; zero if the arithmetic cannot distinguish it from zero."""
    return 0.0 if abs(divergence) < _NO_DIVERGENCE else float(f"{divergence:.3g}")


def _plain(name: str, value: Value) -> Any:
    """A value as plain data. Placement rules are searched as one word, but written as a list."""
    if SETTINGS[name].type == "rules":
        return split_rules(str(value))
    return value


def _settings(outcome: Outcome) -> dict[str, Any]:
    written: dict[str, Any] = {}
    entries = {e.name: e for e in outcome.entries}
    for name in outcome.judged:
        entry = entries.get(name)
        written[name] = (
            "default"
            if entry is None
            else profiles.SettingEntry(
                value=_plain(name, entry.value),
                default=_plain(name, entry.default),
                **_ratio(entry.estimate),
                moves=[*dict.fromkeys(kind_of(m) for m in entry.moves)],  # type: ignore[list-item]
                group=entry.group,
                note=entry.note or None,
            )
        )
    return written


def _kernels(outcome: Outcome) -> dict[str, dict[str, Any]]:
    written: dict[str, dict[str, Any]] = {}
    for kernel in outcome.kernels:
        written.setdefault(kernel.choice.key, {})[kernel.choice.tokens] = profiles.KernelEntry(
            **{
                **dict(kernel.choice.config),
                **_ratio(kernel.estimate),
                "group": kernel.group,
                "note": kernel.screened.describe(),
            }
        )
    for key, tokens in outcome.kernel_defaults:
        written.setdefault(key, {})[tokens] = "default"
    return written


def _metric(workload: Workload, metric: str) -> str:
    return workload.label(metric)


def _evidence(outcome: Outcome, description: Description, made: Made) -> profiles.Evidence:
    workload = made.workload
    tuned = outcome.tuned or outcome.baseline
    return profiles.Evidence(
        workload=_workload(workload, description.engine.get("text_file") or None),
        routing=profiles.Routing(**outcome.routing) if outcome.routing else None,
        crossings={c.knob: profiles.Crossing(**c.to_dict()) for c in outcome.crossings},
        environment=profiles.Environment(**outcome.conditions) if outcome.conditions else None,
        baseline={_metric(workload, m): _rate(r) for m, r in outcome.baseline.items()},
        tuned={_metric(workload, m): _rate(r) for m, r in tuned.items()},
        gain={
            _metric(workload, m): profiles.Gain(**_ratio(g), untouched=m in outcome.untouched or None)
            for m, g in outcome.gain.items()
            if not math.isnan(g.ratio)
        },
        objective=None if outcome.objective == SPEED else outcome.objective,  # type: ignore[arg-type]
        joules_per_token={
            _metric(workload, m): profiles.Energy(default=_joules(a), tuned=_joules(b))
            for m, (a, b) in outcome.joules.items()
        },
        memory_mib=[round(size / MIB, 1) for size in outcome.memory] if outcome.memory else None,
        quality=_quality(outcome, description),
        noise=_noise(list(outcome.noise.values()), outcome, workload),
        journal=f"sha256:{made.journal_sha256}" if made.journal_sha256 else None,
        slice=profiles.Slice(**made.slice) if made.slice else None,
    )


def _quality(outcome: Outcome, description: Description) -> profiles.Quality | None:
    """The answers of the profile and of the default. If the tune was interrupted before its last check, only
    of the default."""
    quality, default = outcome.quality, outcome.default_quality
    if quality is None and not outcome.entries and not outcome.kernels:
        quality = default
    if quality is None and default is None:
        return None
    own: dict[str, Any] = {}
    if quality is not None:
        own = {
            "tokens": quality.tokens, "mean_kld": _digits(quality.mean_kld),
            "max_kld": _digits(quality.max_kld), "top1": round(quality.top1, 6),
        }  # fmt: skip
    return profiles.Quality(
        reference=description.engine.get("reference", "numerics: exact"),
        **own,
        default_mean_kld=_digits(default.mean_kld) if default is not None else None,
        routing_pinned=description.target not in ("llama.cpp", "ik_llama.cpp"),
    )


def _noise(noise: Sequence[Noise], outcome: Outcome, workload: Workload) -> profiles.Noise | None:
    """The noise of the worst metric, and the margin of each."""
    if not noise:
        return None
    margin = max(outcome.margin.values())
    worst = max(noise, key=lambda n: n.margin(1))
    return profiles.Noise(
        margin=round(min(1.0, margin), 4),
        by_measure={_metric(workload, m): round(min(1.0, x), 4) for m, x in outcome.margin.items()},
        half_width=round(min(1.0, margin / 2), 4),
        within_process=round(min(1e6, worst.within), 5),
        between_processes=round(min(1e6, worst.between), 5),
        drift=round(max(-10.0, min(10.0, worst.drift)), 5),
        voided=outcome.voided,
        n=worst.measurements,
    )


def _workload(workload: Workload, text: str | None) -> profiles.Workload:
    """The workload. A mix has all its lengths and depths. The names of the measures, and the weights in their
    order, say which belong together."""
    if not workload.parts:
        return profiles.Workload(
            pp=_some(workload.pp), tg=_some(workload.tg), depth=[workload.depth], text=text
        )
    return profiles.Workload(
        name=workload.name or None,
        text=text,
        pp=sorted({p.tokens for p in workload.parts if p.kind == "pp"}),
        tg=sorted({p.tokens for p in workload.parts if p.kind == "tg"}),
        depth=sorted({p.depth for p in workload.parts}),
        weights=[p.weight for p in workload.parts],
    )


def workload_of(profile: profiles.Profile) -> Workload:
    """The workload of a profile; the default one if the profile has none.

    Raises:
        TuneError: It is a mix, and its weights do not fit its measures.
    """
    evidence = profile.evidence
    if evidence is None or not (evidence.workload.pp or evidence.workload.tg):
        return Workload()
    work = evidence.workload
    if work.name is not None and work.name.startswith("serve:"):
        return Workload.parse(work.name)
    names = list(evidence.baseline) or list(evidence.gain)
    if work.weights:
        if len(work.weights) != len(names):
            raise TuneError(f"the profile has {len(work.weights)} weights for {len(names)} measures")
        parts = [Part.parse(n, w) for n, w in zip(names, work.weights, strict=True)]
        return Workload.mix(parts, work.name or "")
    return Workload(pp=max(work.pp, default=0), tg=max(work.tg, default=0), depth=max(work.depth, default=0))


def _some(count: int) -> list[int]:
    return [count] if count else []


def incumbent_settings(profile: profiles.Profile) -> dict[str, Any]:
    """The values that a profile sets, by name."""
    return {
        name: ",".join(entry.value) if isinstance(entry.value, list) else entry.value
        for name, entry in profile.settings.items()
        if isinstance(entry, profiles.SettingEntry) and name in SETTINGS
    }
