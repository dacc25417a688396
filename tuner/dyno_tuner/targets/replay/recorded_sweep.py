"""Readers of recorded sweeps with one record per configuration and process. Formats are JSON Lines, a JSON
array or CSV as llama-bench writes them, plain or compressed (gzip, xz, bzip2).

Fields can come in any order, be null or be missing. A field that varies between records and is not a
measurement is a setting. `cuda_params` is split into its keys.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ...core.protocol import Value

_NAMES = {"n_ubatch": "ubatch", "n_batch": "batch", "n_threads": "threads"}
# Fields of a record that are not settings: measurements and facts about machine, build and model.
_NO_SETTINGS = frozenset(
    re.findall(
        r"\S+",
        """
    avg_ts stddev_ts samples_ts avg_ns stddev_ns samples_ns t/s test test_time order index id line
    model n_prompt n_gen n_depth build_commit build_number cpu_info gpu_info backends model_filename
    model_type model_size model_n_params n_experts n_expert cuda_params settings error status message
    repeat rep run round iteration trial process pid seed date time timestamp host hostname seconds wall_s
    wall_seconds temperature temperature_c temp_c power_w clock_mhz memory_mib peak_memory_mib routing engine
    version commit device driver note comment label log stderr
    """,
    )
)
_KNOWN_SETTINGS = frozenset(
    re.findall(
        r"\S+",
        """
    ubatch batch threads fused_moe mla_attn attn_max_batch flash_attn type_k type_v n_gpu_layers n_cpu_moe
    split_mode main_gpu no_kv_offload no_op_offload tensor_split tensor_buft_overrides devices repack
    use_mmap embeddings poll cpu_mask cpu_strict mmq_id_size fusion graphs offload_batch_size
    """,
    )
)
# Number of experts by the beginning of a model's name, for records without `n_experts`.
_EXPERTS = {
    "qwen3moe-30b-a3b": 128,
    "qwen3-30b-a3b": 128,
    "qwen3moe-235b": 128,
    "deepseek2-lite": 64,
    "deepseek-v2-lite": 64,
    "deepseek-v3": 256,
    "deepseek-r1": 256,
    "kimi-k2": 384,
    "gpt-oss-20b": 32,
    "gpt-oss-120b": 128,
    "glm4moe": 128,
    "glm-4.5-air": 128,
    "granitemoe": 32,
    "bailingmoe2": 256,
    "mixtral-8x7b": 8,
}
_MAX_RECORDS = 100_000
_MAX_BYTES = 1 << 28  # of text, since a compressed file can expand to any size
_MANY = 24  # an unknown field with this many values is taken for a measurement


def experts_of(model: str) -> int | None:
    """Number of experts of a model by its name; None if the name does not show it."""
    name = model.lower()
    found = [(len(prefix), count) for prefix, count in _EXPERTS.items() if name.startswith(prefix)]
    return max(found)[1] if found else None


@dataclass(frozen=True)
class Record:
    """A process of the sweep. A failed one has no samples."""

    settings: dict[str, Value]
    metric: str
    tokens: int
    depth: int
    samples: tuple[float, ...]  # tokens/s, in order; the first one is cold
    model: str = ""
    failure: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)  # the recorded fields without the samples

    @property
    def warm(self) -> tuple[float, ...]:
        return self.samples[1:] if len(self.samples) > 1 else self.samples


@dataclass
class Sweep:
    """The records of one model in a file."""

    path: str
    model: str
    experts: int | None  # from the file or the user, not guessed from the name
    records: list[Record] = field(default_factory=list)
    models: tuple[str, ...] = ()  # all models in the file

    def workloads(self) -> list[tuple[str, int, int]]:
        """Workloads as (metric, tokens, depth): prompts before generation, then by number of records, largest
        first."""
        counts = Counter((r.metric, r.tokens, r.depth) for r in self.records if r.samples)
        return sorted(counts, key=lambda w: (w[0] != "pp", -counts[w], w[2], -w[1]))


def load_sweep(path: str | Path, experts: int | None = None, model: str | None = None) -> Sweep:
    """Read the records of one model.

    Args:
        experts: number of experts of the model, if the file does not give it.
        model: the model's name or its beginning; by default the model with most records.

    Raises:
        TuneError: the file cannot be read; the message names the line and the fault.
    """
    path = Path(path)
    records: list[Record] = []
    given = experts
    for place, data in _rows(path, _text(path)):
        if len(records) >= _MAX_RECORDS:
            raise TuneError(f"replay {path}: more than {_MAX_RECORDS} records")
        try:
            records.append(_record(data))
            number = data.get("n_experts", data.get("n_expert"))
            if given is None and number not in (None, ""):
                given = int(number)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise TuneError(f"replay {path}, {place}: {what}") from error
    if not any(r.samples for r in records):
        raise TuneError(f"replay {path}: holds no records with rates, so there is nothing to replay")
    models = [name for name, _ in Counter(r.model for r in records if r.samples).most_common()]
    chosen = models[0] if model is None else next((m for m in models if m.startswith(model)), None)
    if chosen is None:
        raise TuneError(f"replay {path}: no records of a model {model!r}; there are {', '.join(models)}")
    kept = [r for r in records if r.model == chosen]
    return Sweep(str(path), chosen, given, _without_measurements(kept), tuple(models))


def _text(path: Path) -> str:
    openers: dict[bytes, Callable[..., Any]] = {
        b"\x1f\x8b": gzip.open,
        b"\xfd7zXZ": lzma.open,
        b"BZh": bz2.open,
    }
    try:
        with path.open("rb") as plain:
            start = plain.read(8)
        opener = next((o for magic, o in openers.items() if start.startswith(magic)), open)
        with opener(path, "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise TuneError(f"replay {path}: more than {_MAX_BYTES >> 20} MiB of text")
        return str(data.decode("utf-8-sig"))
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error  # without [Errno 2]
        raise TuneError(f"replay {path}: cannot be read: {reason}") from error


def _rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All records as pairs (place in the file, record). Raises TuneError."""
    start = text.lstrip()[:1]
    if not start:
        raise TuneError(f"replay {path}: holds no records")
    if start not in "{[":
        yield from _csv_rows(path, text)
        return
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if start == "[":
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TuneError(f"replay {path}, line 1: {error}") from error
        if not parsed:
            raise TuneError(f"replay {path}: holds no records: an empty array, not a JSON object")
        places = [(f"record {n}", value) for n, value in enumerate(parsed, 1)]
    else:
        places = []
        for number, line in lines:
            try:
                places.append((f"line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise TuneError(f"replay {path}, line {number}: {error}") from error
    for place, value in places:
        if not isinstance(value, dict):
            raise TuneError(f"replay {path}, {place}: not a JSON object")
        yield place, value


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        names = reader.fieldnames or []
        if not {"n_prompt", "n_gen", "test"} & set(names):
            raise TuneError(
                f"replay {path}, line 1: neither JSON nor a table with the columns n_prompt and n_gen"
            )
        for row in reader:
            if None in row:
                raise TuneError(f"replay {path}, line {reader.line_num}: more cells than columns")
            yield f"line {reader.line_num}", {n: _cell(v) for n, v in row.items() if v not in (None, "")}
    except csv.Error as error:
        raise TuneError(f"replay {path}, line {reader.line_num}: {error}") from error


def _cell(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text[:1] in "[{":
        return json.loads(text)
    return _number(text)


def _number(text: str) -> Value:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _record(data: Mapping[str, Any]) -> Record:
    settings: dict[str, Value] = {}
    nested = data.get("settings")
    for name, value in {**data, **(nested if isinstance(nested, dict) else {})}.items():
        if name not in _NO_SETTINGS and isinstance(value, bool | int | float | str):
            settings[_NAMES.get(name, name)] = value
    for part in str(data.get("cuda_params") or "").split(","):
        if part:
            name, equals, text = part.partition("=")
            if not equals:
                raise ValueError(f"cuda_params: {part!r} is not of the form key=value")
            settings[name.strip().replace("-", "_")] = _number(text.strip())
    metric, tokens, depth = _work(data)
    samples = _samples(data, tokens)
    failure = str(data.get("error") or data.get("message") or data.get("status") or "")
    if not samples and not failure:
        raise ValueError(f"samples_ts={data.get('samples_ts')!r} are not rates in tokens/s")
    row = {n: v for n, v in data.items() if n not in ("samples_ts", "samples_ns")}
    model = str(data.get("model") or data.get("model_filename") or data.get("model_type") or "")
    return Record(settings, metric, tokens, depth, samples, model, "" if samples else failure, row)


def _work(data: Mapping[str, Any]) -> tuple[str, int, int]:
    if "n_prompt" not in data and "n_gen" not in data and isinstance(data.get("test"), str):
        found = re.fullmatch(r"(pp|tg)([0-9]+)(?: *@ *d([0-9]+))?", data["test"])
        if not found:
            raise ValueError(f"test={data['test']!r}: write pp4096 or tg128 @ d4096")
        return found[1], int(found[2]), int(found[3] or 0)
    prompt, generated = int(data["n_prompt"] or 0), int(data["n_gen"] or 0)
    if (prompt > 0) == (generated > 0):
        raise ValueError(f"n_prompt={prompt} and n_gen={generated}: exactly one must be positive")
    return ("pp" if prompt else "tg"), prompt or generated, int(data.get("n_depth") or 0)


def _samples(data: Mapping[str, Any], tokens: int) -> tuple[float, ...]:
    """Rates in tokens/s, from times or the mean if the record has nothing else."""
    if data.get("samples_ts") is not None:
        given = [float(s) for s in data["samples_ts"] if s is not None]
    elif data.get("samples_ns") is not None:
        given = [
            tokens / float(s) * 1e9 if float(s) > 0 else -1.0 for s in data["samples_ns"] if s is not None
        ]
    elif data.get("avg_ts") is not None:
        given = [float(data["avg_ts"])]
    elif any(data.get(n) for n in ("error", "status", "message")):
        given = []
    else:
        raise KeyError("samples_ts")
    if not all(math.isfinite(s) and 0 < s < 1e9 for s in given):
        raise ValueError(f"samples_ts={given!r} are not rates in tokens/s")
    return tuple(given)


def _without_measurements(records: list[Record]) -> list[Record]:
    """Drop unknown fields whose value differs in nearly every record: they are counters or readings."""
    values: dict[str, set[Value]] = {}
    for record in records:
        for name, value in record.settings.items():
            values.setdefault(name, set()).add(value)
    noise = {
        n
        for n, seen in values.items()
        if n not in _KNOWN_SETTINGS and (len(seen) > _MANY or (len(seen) == len(records) > 8))
    }
    for record in records:
        for name in noise & set(record.settings):
            del record.settings[name]
    return records
