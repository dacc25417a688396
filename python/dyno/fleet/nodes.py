"""Descriptions of nodes, read into devices: Kubernetes labels, `nvidia-smi -q -x`, `dyno info --json`.

Labels may be a Node or a list of nodes as `kubectl get … -o json|yaml` prints them, a map of labels, or lines
`key=value` as GPU Feature Discovery writes them to its file.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dyno._wrong_values import not_given, plain_words
from dyno.errors import ProfileError
from dyno.fleet.products import find_product
from dyno.profiles import _yaml
from dyno.profiles.identity import CpuDevice, CudaDevice, device_from_info

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CHARS = 64 << 20
"""Most characters of a description."""
_GPU = "nvidia.com/"
_SHARED = "-SHARED"
_MIG = re.compile(r"-MIG-\S+$")
_MIXED = re.compile(r"nvidia\.com/(mig-[0-9]+g\.[0-9]+gb\S*)\.count")


@dataclass(frozen=True, slots=True)
class Node:
    """The devices of one kind in a node."""

    name: str
    title: str
    """Product name in the description."""
    device: CpuDevice | CudaDevice | None
    """None if the description is incomplete; `problem` names the missing facts."""
    count: int = 1
    problem: str = ""
    assumed: tuple[str, ...] = ()
    """Properties that are missing in the description and come from the table of products."""
    driver: str | None = None


def read_nodes(text: str, name: str) -> list[Node]:
    """The nodes of a description, one entry for each kind of device on a node.

    Args:
        text: Labels, the XML of `nvidia-smi -q -x`, or the JSON of `dyno info --json`.
        name: Name of the file, for messages and for descriptions without a node name.

    Raises:
        ProfileError: The text has none of these formats, or is too large. The message says what was expected.
    """
    if len(text) > MAX_CHARS:
        raise ProfileError(f"[fleet] {name}: {len(text)} characters; at most {MAX_CHARS} are read")
    start = text.lstrip()[:1]
    if start == "<":
        return _from_smi(text, name)
    data = _parsed(text, name)
    if isinstance(data, dict) and isinstance(data.get("devices"), list):
        return _from_info(data, name)
    found = [node for title, labels, _ in _labelled(data, name) for node in _from_labels(labels, title)]
    if not found:
        raise ProfileError(
            f"[fleet] {name}: neither labels of a node, nor `nvidia-smi -q -x`, nor `dyno info --json`"
        )
    return found


def _parsed(text: str, name: str) -> Any:
    """Parse JSON, lines `key=value`, or YAML."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"[fleet] {name}: not JSON: {error}") from error
    lines = [line.strip() for line in re.split(r"[\n,]", text) if line.strip()]
    pairs = [line.partition("=") for line in lines if not line.startswith("#")]
    if pairs and all(equals and re.fullmatch(r"[\w./-]+", key) for key, equals, _ in pairs):
        return {key: value for key, _, value in pairs}
    try:
        return _yaml.parse(text)[0]
    except _yaml.YamlProblem as error:
        raise ProfileError(
            f"[fleet] {name}: {error.message}; a larger list of nodes can be given as JSON (-o json)"
        ) from error


def _labelled(data: Any, name: str) -> list[tuple[str, dict[str, str], str]]:
    """Name and labels of each node in the output of `kubectl`, or in one map of labels."""
    if isinstance(data, dict) and isinstance(data.get("items"), list):
        return [row for item in data["items"] for row in _labelled(item, name)]
    if not isinstance(data, dict):
        return []
    about = data.get("metadata")
    if isinstance(about, dict):
        labels = about.get("labels")
        named = about.get("name")
        return _labelled(labels, named if isinstance(named, str) else name)
    labels = {k: str(v) for k, v in data.items() if isinstance(k, str) and isinstance(v, str | int | float)}
    return [(name, labels, "")] if labels and len(labels) == len(data) else []


def _count(labels: Mapping[str, str], key: str, name: str) -> int | None:
    """The whole number of a label; None if the label is missing.

    Raises:
        ProfileError: The label is not a whole number of a plausible size.
    """
    text = labels.get(_GPU + key)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ProfileError(f"[fleet] {name}: label {_GPU}{key} is {text!r}; expected a whole number")
    return int(text)


def _from_labels(labels: Mapping[str, str], name: str) -> list[Node]:
    mixed = sorted({found[1] for key in labels if (found := _MIXED.fullmatch(key))})
    whole = _labelled_device(labels, name)
    nodes = [] if whole is None or (mixed and whole.count == 0) else [whole]
    for kind in mixed:
        here = {
            _GPU + "gpu.product": f"{labels.get(_GPU + 'gpu.product', 'GPU')}-{kind.upper()}",
            **{k: v for k, v in labels.items() if k.startswith(_GPU + "gpu.compute.")},
            **{
                _GPU + f"gpu.{part}": labels[f"{_GPU}{kind}.{part}"]
                for part in ("count", "memory", "multiprocessors")
                if f"{_GPU}{kind}.{part}" in labels
            },
        }
        part = _labelled_device(here, name)
        nodes += [] if part is None else [part]
    if nodes:
        return nodes
    return [
        Node(
            name,
            "no GPU",
            None,
            0,
            "its labels name no GPU; for a CPU, give the output of `dyno info --json`",
        )
    ]


def _labelled_device(labels: Mapping[str, str], name: str) -> Node | None:
    title = labels.get(_GPU + "gpu.product", "")
    if not title:
        return None
    shared = title.endswith(_SHARED)
    product = find_product(_MIG.sub("", title.removesuffix(_SHARED)))
    part = _MIG.search(title) is not None
    major, minor = (_count(labels, f"gpu.compute.{end}", name) for end in ("major", "minor"))
    capability = f"{major}.{minor or 0}" if major is not None else product.capability if product else None
    sms = _count(labels, "gpu.multiprocessors", name)
    assumed = []
    if sms is None and product is not None and not part:
        sms = product.sm_count
        assumed.append(f"{sms} SMs, as {product.name} has")
    watts = None if product is None or part else product.power_w
    if watts is not None and product is not None:
        assumed.append(f"power limit {watts:g} W, the default of {product.name}")
    version = [labels.get(f"{_GPU}cuda.driver.{end}", "") for end in ("major", "minor", "rev")]
    driver = labels.get(f"{_GPU}cuda.driver-version.full") or ".".join(v for v in version if v) or None
    count = _count(labels, "gpu.count", name)
    node = _node(
        name, title, capability, sms, _count(labels, "gpu.memory", name), watts, tuple(assumed), driver
    )
    if shared:
        node = replace(
            node, problem=node.problem or "", assumed=(*node.assumed, "several pods share this GPU")
        )
    return replace(node, count=1 if count is None else count)


def _node(
    name: str,
    title: str,
    capability: str | None,
    sms: int | None,
    memory: int | None,
    watts: float | None,
    assumed: tuple[str, ...],
    driver: str | None,
) -> Node:
    """A node with a device of these properties; without a device if a needed property is unknown.

    Raises:
        ProfileError: No device has a property of this size.
    """
    told = {"compute capability": capability, "SM count": sms, "memory": memory}
    missing = [what for what, value in told.items() if not value]
    if capability is None or not sms or not memory:
        problem = (
            f"{' and '.join(missing)} of {title} cannot be determined from this description; "
            "run `dyno info --json` on the node instead"
        )
        return Node(name, title, None, 1, problem, assumed, driver)
    try:
        device = CudaDevice(
            compute_capability=capability, sm_count=sms, memory_mib=memory, power_limit_w=watts
        )
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise ProfileError(
            f"[fleet] {name}: {wrong['loc'][0]} of {title} {plain_words(wrong)}{not_given(wrong)}"
        ) from error
    return Node(name, title, device, 1, "", assumed, driver)


def _amount(gpu: ElementTree.Element, *paths: str) -> float | None:
    """The number of a text with a unit, such as `700.00 W` or `143771 MiB`; None if the driver does not
    report it."""
    for path in paths:
        found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]+)?)\s+(?:W|MiB)\s*", gpu.findtext(path) or "")
        if found:
            return float(found[1])
    return None


def _from_smi(text: str, name: str) -> list[Node]:
    if "<!ENTITY" in text:
        raise ProfileError(f"[fleet] {name}: this XML declares entities, which nvidia-smi never does")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ProfileError(f"[fleet] {name}: not XML: {error}") from error
    if root.tag != "nvidia_smi_log":
        raise ProfileError(
            f"[fleet] {name}: the root element is <{root.tag}>; expected the output of `nvidia-smi -q -x`"
        )
    counted: dict[Node, int] = {}
    for gpu in root.findall("gpu"):
        title = (gpu.findtext("product_name") or "GPU").strip()
        product = find_product(title)
        mig = (gpu.findtext("mig_mode/current_mig") or "").strip() == "Enabled"
        memory = _amount(gpu, "fb_memory_usage/total")
        watts = _amount(
            gpu,
            "gpu_power_readings/current_power_limit",
            "gpu_power_readings/enforced_power_limit",
            "power_readings/enforced_power_limit",
            "gpu_power_readings/power_limit",
            "power_readings/power_limit",
        )
        assumed = () if product is None else (f"{product.sm_count} SMs, as {product.name} has",)
        node = _node(
            name,
            title,
            product.capability if product else None,
            product.sm_count if product else None,
            None if memory is None else round(memory),
            watts,
            assumed,
            (root.findtext("driver_version") or "").strip() or None,
        )
        if mig:
            problem = f"{title} is partitioned (MIG); labels or `dyno info --json` describe the parts"
            node = replace(node, device=None, problem=problem)
        counted[node] = counted.get(node, 0) + 1
    if not counted:
        raise ProfileError(f"[fleet] {name}: nvidia-smi lists no GPU")
    return [replace(node, count=count) for node, count in counted.items()]


def _from_info(data: Mapping[str, Any], name: str) -> list[Node]:
    """The GPUs that `dyno info --json` lists, else its CPU."""
    try:
        listed = [dict(info) for info in data["devices"]]
        gpus = [info for info in listed if info["kind"] == "cuda"]
        counted: dict[Node, int] = {}
        for info in gpus or listed:
            title, problem = str(info.get("name") or info["kind"]), str(info.get("problem") or "")
            device = None if problem else device_from_info(info)
            driver = info.get("driver")
            node = Node(name, title, device, 1, problem, (), None if driver is None else str(driver))
            counted[node] = counted.get(node, 0) + 1
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProfileError(
            f"[fleet] {name}: not the output of `dyno info --json`: {type(error).__name__}: {error}"
        ) from error
    if not counted:
        raise ProfileError(f"[fleet] {name}: it lists no device")
    return [replace(node, count=count) for node, count in counted.items()]
