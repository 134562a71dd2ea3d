"""The doctor's probe, under every Python of this machine, and the sessions that talk with it; no ssh, no other host."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import children

from hvdtrain.cluster.doctor import probe_links
from hvdtrain.cluster.doctor.examine import Sessions
from hvdtrain.cluster.hosts import probe
from hvdtrain.cluster.hosts.ssh import Ssh


class Session(Sessions):
    """The probe on this machine alone."""

    def __init__(self, python: str) -> None:
        super().__init__(["localhost"], python, Ssh())

    def answer(self, request: dict[str, Any], timeout_s: float) -> Any:
        replies = self.ask({"localhost": request}, timeout_s)
        assert replies, self.lost
        return replies["localhost"]


def interpreters() -> dict[str, str]:
    """Every Python of this machine that the probe must run under."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for minor in range(6, 16):
        version = f"3.{minor}"
        built = [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
        for place in filter(None, [*built, shutil.which(f"python{version}")]):
            done = subprocess.run(
                [place, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True
            )
            if done.stdout.strip() == str(minor):
                found.setdefault(version, place)
    return found


def test_the_probe_runs_under_old_and_new_pythons() -> None:
    for version, place in interpreters().items():
        session = Session(place)
        try:
            for _ in range(3):  # a busy machine's tools may be late once, a Python that lacks something always
                facts = session.answer({"do": "facts", "cwd": "/", "run_dir": "/tmp/none"}, 20)
                unanswered = [name for name, its in facts.items() if isinstance(its, dict) and "unanswered" in its]
                if not unanswered:
                    break
            assert session.answer({"do": "unmark"}, 5) == {}
        finally:
            session.close()
        assert facts["python"]["version"].startswith(version + ".")
        assert not unanswered, (version, {name: facts[name] for name in unanswered})


def test_variables_that_look_secret_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "s3cret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HOME_OF_NOBODY", "x")
    facts = probe.facts({"cwd": "/", "run_dir": "/"})
    assert facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert "s3cret" not in json.dumps(facts) and "HOME_OF_NOBODY" not in json.dumps(facts)


# -- sessions -------------------------------------------------------------------------------------------------
@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(sys.executable)
    yield made
    made.close()


def test_ports_are_open_where_asked_and_for_those_who_know_the_token(session: Session) -> None:
    listen = {"do": "listen", "token": "t" * 32}
    assert session.answer(listen | {"address": "192.0.2.77"}, 5).keys() == {"text"}
    port = session.answer(listen | {"address": "127.0.0.1"}, 5)["port"]
    process = children()[0]
    assert {item.laddr.ip for item in process.net_connections("tcp")} == {"127.0.0.1"}
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(10) == b"", "a stranger is turned away"
    peer = ["127.0.0.1", port]
    visit = {"do": "reach", "peers": [["me", *peer]], "token": "t" * 32, "timeout_s": 2}
    assert session.answer(visit, 5)["reach"]["me"]["seconds"] < 2
    assert session.answer(visit | {"token": "u" * 32}, 5)["reach"]["me"]["error"] == "other"
    flow = session.answer({"do": "send", "peer": peer, "token": "t" * 32, "seconds": 0.05, "timeout_s": 2}, 5)
    assert flow["bytes"] >= probe_links.CHUNK_BYTES and flow["seconds"] > 0


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_host_that_hangs_costs_its_time_and_leaves_nothing(tmp_path: Path) -> None:
    session = Session(script(tmp_path, "exec sleep 1000"))
    started = time.monotonic()
    assert session.ask({"localhost": {"do": "unmark"}}, 0.5) == {}
    assert session.lost["localhost"].kind == "timeout" and time.monotonic() - started < 3
    assert not children()


def test_a_host_that_hangs_does_not_cost_the_others_their_answers(tmp_path: Path) -> None:
    text = f'mkdir {tmp_path}/first 2>/dev/null && exec sleep 1000\nexec {sys.executable} "$@"'
    names = ["localhost", "127.0.0.1"]  # one of them is the first
    sessions = Sessions(names, script(tmp_path, text), Ssh())
    try:
        answers = sessions.ask(dict.fromkeys(names, {"do": "unmark"}), 2)
        (name,) = answers
        assert [problem.kind for problem in sessions.lost.values()] == ["timeout"] and name not in sessions.lost
        assert sessions.ask(dict.fromkeys(names, {"do": "unmark"}), 5).keys() == {name}
    finally:
        sessions.close()
    assert not children()


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        ("echo 'this is Python 2.7.18' >&2; exit 1", "no_python", "2.7.18: too old"),
        ("echo \"No module named 'hvdtrain'\" >&2; exit 1", "no_hvdtrain", "no hvdtrain"),
        ("exit 3", "other", "ended with 3"),
    ],
)
def test_a_session_that_ends_says_why(tmp_path: Path, text: str, kind: str, what: str) -> None:
    session = Session(script(tmp_path, text))
    try:
        for limit_s in (10, 0):  # the second question is told the same, at once
            assert session.ask({"localhost": {"do": "unmark"}}, limit_s) == {}
            assert session.lost["localhost"].kind == kind and what in session.lost["localhost"].what
    finally:
        session.close()
