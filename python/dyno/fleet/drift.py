"""Comparison of the speed that a server reports with the speed that its profile promises.

dyno's server reports both. llama-server reports the tokens and seconds of all requests since its start, and
the promise comes from a profile for it.
"""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dyno.profiles import Profile

HOLDS_CODE, DRIFTED_CODE, UNKNOWN_CODE = 0, 3, 4
MOST_BYTES = 16 << 20
_MEASURED_WITH = {
    "same_device": "on a similar device",
    "nearest": "on a similar device",
    "other_model": "with another model",
}
_LLAMA = {
    "pp": ("llamacpp:prompt_tokens", "llamacpp:prompt_seconds"),
    "tg": ("llamacpp:tokens_predicted", "llamacpp:tokens_predicted_seconds"),
}


@dataclass(frozen=True)
class Drift:
    """The promised and the measured speed of one measure: `pp` (prompts) or `tg` (generation)."""

    metric: str
    promised: float | None
    """Promised tokens per second; None if no profile has them."""
    measured: float | None
    """Measured tokens per second; None if the server has measured nothing comparable."""

    @property
    def ratio(self) -> float | None:
        """Measured / promised."""
        return self.measured / self.promised if self.measured is not None and self.promised else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "promised": self.promised,
            "measured": self.measured,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Report:
    """All measures of one server, and the profile that it runs with."""

    rows: tuple[Drift, ...]
    profile: Mapping[str, str]
    """`state`, `match` and `hash` as dyno's server reports them; empty for llama-server."""
    own_promise: bool = True
    """Whether the server reports the promise, so that `match` says for which device it is."""

    @property
    def note(self) -> str:
        """The reason why the measured speed is missing, or may be lower without any drift; "" if there is
        none."""
        if self.profile.get("state") in ("none", "off"):
            return "the server runs without a profile, so it measures no comparable speed; give it one"
        other = _MEASURED_WITH.get(self.profile.get("match", "")) if self.own_promise else None
        if other is None:
            return ""
        return (
            f"the profile was measured {other}, so its speed is no promise here, and less is no drift "
            f"(exit code {UNKNOWN_CODE}); tune the server's machine"
        )

    def code(self, within: float) -> int:
        """Exit code: 0 if all measures reach `1 - within` of their promise, 3 if one does not, 4 if nothing
        can be compared, or if the promise is for another device or model and one does not reach it."""
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        if not ratios:
            return UNKNOWN_CODE
        if min(ratios) >= 1 - within:
            return HOLDS_CODE
        return UNKNOWN_CODE if self.note else DRIFTED_CODE


def fetch(url: str, timeout: float = 10.0) -> str:
    """The text of a page of metrics.

    Args:
        url: `http://` or `https://`; `/metrics` is added if it has no path.

    Raises:
        ProfileError: The server does not answer, or answers with something else.
    """
    if not url.startswith(("http://", "https://")):
        raise ProfileError(
            f"[fleet] --metrics {url!r}: not the address of a server; write, for example, http://host:8080"
        )
    scheme, _, rest = url.partition("://")
    whole = f"{scheme}://{rest.rstrip('/')}/metrics" if "/" not in rest.rstrip("/") else url
    try:
        with urllib.request.urlopen(whole, timeout=timeout) as answer:
            data = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()  # closes the connection
        raise ProfileError(f"[fleet] {whole}: the server answers {error.code} {error.reason}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason  # without [Errno 111]
        raise ProfileError(f"[fleet] {whole} does not answer: {reason}") from error
    except http.client.InvalidURL as error:
        raise ProfileError(f"[fleet] --metrics {url!r}: not the address of a server: {error}") from error
    except http.client.HTTPException as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ProfileError(f"[fleet] {whole} does not answer as a web server: {told:.200}") from error
    if len(data) > MOST_BYTES:
        raise ProfileError(
            f"[fleet] {whole}: more than {MOST_BYTES >> 20} MiB, so this is not a page of metrics"
        )
    return str(data.decode("utf-8", errors="replace"))


def report(text: str, profile: Profile | None = None) -> Report:
    """The measures of a page of metrics.

    Args:
        profile: The profile of the server. dyno's server reports its promise itself.

    Raises:
        ProfileError: The text is not a page of Prometheus metrics of one of these servers, or the profile is
        for another engine.
        ImportError: The package prometheus-client is missing.
    """
    samples = _samples(text)
    engine = profile.match.engine.name if profile is not None else ""
    promised = _promises(profile)
    facts = next((labels for name, labels, _ in samples if name == "dyno_profile_info"), {})
    if facts or any(name.startswith("dyno_") for name, _, _ in samples):
        if engine not in ("", "dyno"):
            raise ProfileError(f"[fleet] the server is `dyno serve`, and the profile is for {engine}")
        told = {
            labels.get("metric", ""): value
            for name, labels, value in samples
            if name == "dyno_profile_promised_tokens_per_second" and _is_known(value)
        }
        ratios = {
            labels.get("metric", ""): value
            for name, labels, value in samples
            if name == "dyno_profile_speed_ratio" and _is_known(value)
        }
        rows = []
        for metric in ("pp", "tg"):
            own = told.get(metric)
            ratio = ratios.get(metric)
            measured = own * ratio if own is not None and ratio is not None else None
            rows.append(Drift(metric, promised.get(metric, own), measured))
        return Report(tuple(rows), facts, own_promise=not promised)
    values = {name.removesuffix("_total"): value for name, _, value in samples if _is_known(value)}
    if not any(name.startswith("llamacpp:") for name, _, _ in samples):
        raise ProfileError("[fleet] these metrics are neither of `dyno serve` nor of llama-server --metrics")
    if engine == "dyno":
        raise ProfileError("[fleet] the server is llama-server, and the profile is for dyno")
    rows = []
    for metric, (tokens, seconds) in _LLAMA.items():
        made, spent = values.get(tokens), values.get(seconds, 0.0)
        measured = made / spent if made is not None and spent > 0 else None
        rows.append(Drift(metric, promised.get(metric), measured))
    return Report(tuple(rows), {})


def _is_known(value: float) -> bool:
    """Whether a sample has a value. Prometheus has NaN for a value that is missing."""
    return math.isfinite(value) and value >= 0


def _promises(profile: Profile | None) -> dict[str, float]:
    """Promised tokens per second by measure: of the longest prompt and of the first generation in the
    profile."""
    tuned = profile.evidence.tuned if profile is not None and profile.evidence is not None else {}
    found: dict[str, float] = {}
    for name, rate in sorted(tuned.items(), key=lambda item: (len(item[0]), item[0])):
        kind, size = name[:2], name[2:].partition("@")[0]
        if kind in ("pp", "tg") and size.isdigit() and rate > 0 and (kind == "pp" or kind not in found):
            found[kind] = rate
    return found


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ImportError(
            "reading metrics needs prometheus-client: pip install 'gguf-dyno[serve]'"
        ) from error
    try:
        return [
            (sample.name, dict(sample.labels), float(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except (ValueError, KeyError, IndexError) as error:
        raise ProfileError(f"[fleet] not a page of Prometheus metrics: {error}") from error
