"""The sidecar's schema: sources and their order, what is refused and in which words."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from parlay.controller.cli import serve
from parlay.controller.config import FIELDS, Config, changed, flag, load, said_of_file, variable
from parlay.controller.running import doors


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "parlay.toml"
    file.write_text(text)
    return file


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'tenant = "file"\nmodel = "file"\nhttp = "file:1"\nlog_sample = 0.1')
    environ = {"PARLAY_TENANT": "env", "PARLAY_MODEL": "env", "PARLAY_DATA": "/x"}
    found = load({"tenant": "flag", "model": None}, file, environ)
    assert (found.tenant, found.model, found.http) == ("flag", "env", "file:1")
    assert (found.log_sample, found.policy) == (0.1, "pilot")


def test_an_empty_variable_says_nothing() -> None:
    assert load({}, None, {"PARLAY_TENANT": ""}) == Config()


def test_settings_go_with_their_policy(tmp_path: Path) -> None:
    file = written(tmp_path, 'policy = "fixed"\n[set]\nk = 3\nproposer = "draft_model"\n')
    assert load({}, file, {}).set == {"k": "3", "proposer": "draft_model"}
    assert load({"set": ["k=4"]}, file, {}).set == {"k": "4", "proposer": "draft_model"}
    assert load({}, file, {"PARLAY_POLICY": "none"}).set == {}
    environ = {"PARLAY_POLICY": "goodput", "PARLAY_SET": "a=1 b=2"}
    assert load({}, file, environ).set == {"a": "1", "b": "2"}
    assert load({"policy": "none"}, file, environ).set == {}


def test_every_kind_is_read_from_a_text_and_from_toml(tmp_path: Path) -> None:
    pki = {"tls_cert": "/c", "tls_key": "/k", "client_ca": "/ca"}
    texts = {**pki, "client_names": "a, b", "socket_mode": "0660", "log_sample": "0.5"}
    values = '\nclient_names = ["a", "b"]\nsocket_mode = "0o660"\nlog_sample = 0.5\n'
    file = written(tmp_path, "".join(f'{k} = "{v}"\n' for k, v in pki.items()) + values)
    found = load(texts, None, {})
    assert found == load({}, file, {})
    assert (found.socket_mode, found.client_names) == (0o660, ("a", "b"))
    assert found.tls_cert == Path("/c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("polcy = 'none'", "unknown key 'polcy', did you mean 'policy'?"),
        ("zzzzzz = 1", "unknown key 'zzzzzz'; there are listen, policy"),
        ("log_sample = 1.5", "log_sample 1.5: must be a number, 0 to 1"),
        ("log_sample = true", "log_sample True: must be a number"),
        ("log_sample = nan", "log_sample nan: must be a number"),
        ("listen = 5", "listen 5: must be a text"),
        ("log = ''", "log '': must be a path"),
        ("socket_mode = 600", "socket_mode 600: must be octal"),
        ("socket_mode = '888'", "must be octal"),
        ("socket_mode = '0060'", "must let its owner read and write"),
        ("socket_mode = '1777'", "must be octal"),
        ("admin_names = 'a'\nlog_level = 'loud'", "log_level 'loud': must be one of debug, info"),
        ("client_names = [1]", "must be a list of names"),
        ("[set.inner]\na = 1", "must be a table of values"),
        ("listen = ", "no TOML"),
        ("state = ['redis://:hunter22@h']", "state must be a text"),
    ],
)
def test_what_a_file_says_wrong_is_one_line_with_file_and_key(
    tmp_path: Path, text: str, said: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ValueError, match=r"parlay\.toml: ") as caught:
        load({}, file, {})
    line = str(caught.value)
    assert said in line
    assert "\n" not in line
    assert "hunter22" not in line


def test_the_other_sources_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PARLAY_LOG_SAMPLE '2': must be"):
        load({}, None, {"PARLAY_LOG_SAMPLE": "2"})
    with pytest.raises(ValueError, match="--log-sample 'x': must be"):
        load({"log_sample": "x"}, None, {})
    with pytest.raises(OSError, match="cannot read"):
        load({}, tmp_path / "absent", {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_cert": "/c"}, "tls_cert needs tls_key too"),
        ({"client_ca": "/c"}, "client_ca needs tls_cert too"),
        ({"client_names": "a"}, "client_names needs client_ca too"),
        ({"admin_tokens": "/t"}, "need admin, the address"),
        ({"http_tokens": "/t"}, "http_tokens needs http too"),
        ({"admin": "unix:/a", "listen": "unix:///x/../a"}, "another address than listen"),
        ({"admin": "127.0.0.1:9", "listen": "127.0.0.1:9"}, "another address than listen"),
        ({"admin": "unix:/a", "tokens": "/t", "admin_tokens": "/t"}, "must be another file"),
    ],
)
def test_what_needs_something_else_says_so(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(given, None, {})


def test_port_0_is_another_address_each_time() -> None:
    assert Config(admin="127.0.0.1:0", listen="127.0.0.1:0").admin


def test_a_file_that_is_missing_is_named_with_its_key(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    config = Config(listen="unix:/l", admin="unix:/a", admin_tokens=missing)
    with pytest.raises(FileNotFoundError) as caught:
        doors(config)
    line = f"{missing}: No such file or directory"
    assert said_of_file(caught.value, config) == f"admin_tokens: {line}"
    assert said_of_file(caught.value, None) == line
    assert said_of_file(ValueError("x"), config) == "x"


def test_certificates_of_one_signer_need_names_to_tell_people_from_engines() -> None:
    same = {"tls_cert": "/c", "tls_key": "/k", "client_ca": "/ca", "admin_client_ca": "/ca"}
    with pytest.raises(ValueError, match="admin_names is needed"):
        load({**same, "admin": "127.0.0.1:1"}, None, {})
    load({**same, "admin": "127.0.0.1:1", "admin_names": "ops"}, None, {})
    with pytest.raises(ValueError, match="client_ca is for host:port"):
        load({**same, "listen": "unix:/s"}, None, {})


def test_what_differs_is_hot_or_needs_a_restart() -> None:
    old = Config()
    new = dataclasses.replace(
        old, log_level="debug", log_sample=0.5, listen="unix:/s", state="file:/x"
    )
    assert changed(old, old) == ({}, [])
    assert changed(old, new) == ({"log_level": "debug", "log_sample": 0.5}, ["listen", "state"])


def test_every_key_is_a_flag_and_says_what_it_is() -> None:
    assert list(inspect.signature(serve).parameters) == ["config", *FIELDS]
    assert (flag("log_sample"), variable("log_sample")) == ("--log-sample", "PARLAY_LOG_SAMPLE")
    assert all(found.metadata["help"] for found in FIELDS.values())


def test_a_switch_is_read_from_a_flag_a_text_and_toml(tmp_path: Path) -> None:
    assert not Config().reflection
    assert load({"reflection": True}, None, {}).reflection
    assert load({}, None, {"PARLAY_REFLECTION": "1"}).reflection
    file = written(tmp_path, "reflection = true\notel = 'yes'\n")
    assert (load({}, file, {}).reflection, load({}, file, {}).otel) == (True, True)
    assert not load({"reflection": False}, file, {}).reflection
    with pytest.raises(ValueError, match="PARLAY_OTEL 'maybe': must be true or false"):
        load({}, None, {"PARLAY_OTEL": "maybe"})


def test_a_password_in_the_state_is_not_shown() -> None:
    assert "hunter22" not in repr(load({"state": "redis://:hunter22@host"}, None, {}))
