"""scripts/ssh_setup.sh on hosts that nobody has set up: a user with a password, no keys, no known hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import Cluster, cluster
from harness import REPOSITORY, Result

SCRIPT = REPOSITORY / "scripts" / "ssh_setup.sh"
USER, PASSWORD = "trainer", "a throwaway"
NAMES = ["host1", "host2"]


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with cluster(2) as c:
        for host in NAMES:
            c.add_user(host, USER, PASSWORD)
        for name, text in (("askpass", f"#!/bin/sh\necho '{PASSWORD}'\n"), ("setup.sh", SCRIPT.read_text())):
            (c.folder / name).write_text(text)  # where the user can read it, which a checkout need not be
            (c.folder / name).chmod(0o755)
        yield c


@pytest.fixture
def hosts(made: Cluster) -> Cluster:
    """The hosts, as the user finds them: empty home folders."""
    for host in NAMES:
        shutil.rmtree(made.home(host, USER) / ".ssh", ignore_errors=True)
    return made


def set_up(c: Cluster, *arguments: str, answer: str | None = None) -> Result:
    """Run the script as the user on host1; `answer` is typed on a terminal, without it there is none."""
    env = {"SSH_ASKPASS": str(c.folder / "askpass"), "SSH_ASKPASS_REQUIRE": "force"}
    line: list[str | Path] = [c.folder / "setup.sh", *arguments]
    if answer is None:
        return c.run("host1", line, user=USER, cwd="/", env=env)
    ours, its = os.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        with c.popen("host1", line, user=USER, cwd="/", env=env, stdin=its, stdout=-1, stderr=-1) as process:
            out, err = process.communicate(timeout=60)
            return Result(process.returncode, out.decode(), err.decode(), 0)
    finally:
        os.close(ours)
        os.close(its)


def fingerprint(c: Cluster, host: str) -> str:
    key = c.etc(host) / "ssh" / "ssh_host_ed25519_key.pub"
    return subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True).stdout.split()[1]


def trusted(c: Cluster) -> list[str]:
    return [word for host in NAMES for word in ("--fingerprint", f"{host}={fingerprint(c, host)}")]


def files(c: Cluster) -> dict[str, bytes]:
    return {f"{host}: {path.name}": path.read_bytes() for host in NAMES for path in ssh(c, host).glob("*")}


def ssh(c: Cluster, host: str) -> Path:
    return c.home(host, USER) / ".ssh"


def reaches(c: Cluster, host: str, other: str) -> Result:
    return c.run(host, ["ssh", "-o", "BatchMode=yes", other, "hostname"], user=USER, cwd="/")


def refused(done: Result, *parts: str) -> None:
    assert done.returncode == 2, done.text
    for part in parts:
        assert part in done.err, done.text


def test_every_host_reaches_every_other_and_a_second_run_changes_nothing(hosts: Cluster) -> None:
    first = set_up(hosts, *trusted(hosts), *NAMES).check()
    assert "host2: lets this machine's key in" in first.out
    for host in NAMES:
        for other in NAMES:
            assert reaches(hosts, host, other).check().out == f"{other}\n"
    before = files(hosts)
    private = {before[f"{host}: id_ed25519"] for host in NAMES}
    assert len(private) == len(NAMES), "a private key never leaves its host"
    assert all(oct(ssh(hosts, host).stat().st_mode)[-3:] == "700" for host in NAMES)
    assert set_up(hosts, *NAMES).check().out == "ssh_setup: done: 2 host(s)\n", "nothing to learn, nobody to ask"
    assert files(hosts) == before


def test_keys_of_hosts_from_a_file(hosts: Cluster) -> None:
    given = hosts.folder / "given"
    key = (hosts.etc("host2") / "ssh" / "ssh_host_ed25519_key.pub").read_text()
    given.write_text(f"host2 {key}")
    given.chmod(0o644)
    refused(set_up(hosts, "--known-hosts", str(given), *NAMES), "host1: its key is neither known here nor in")
    set_up(hosts, "--one-way", "--known-hosts", str(given), "host2").check()


def test_an_unknown_key_is_shown_and_must_be_confirmed(hosts: Cluster) -> None:
    known = ssh(hosts, "host1") / "known_hosts"
    refused(set_up(hosts, "host2"), "no terminal to ask on", fingerprint(hosts, "host2"))
    assert not known.exists()
    refused(set_up(hosts, "host2", answer="no"), fingerprint(hosts, "host2"), "was not confirmed")
    assert not known.exists()
    done = set_up(hosts, "--one-way", "host2", answer="yes").check()
    assert fingerprint(hosts, "host2") in done.err
    reaches(hosts, "host1", "host2").check()
    assert reaches(hosts, "host2", "host1").returncode == 255, "one way"


def test_a_key_that_changed_is_refused_and_not_replaced(hosts: Cluster) -> None:
    set_up(hosts, "--one-way", *trusted(hosts), "host2").check()
    known = ssh(hosts, "host1") / "known_hosts"
    other = (hosts.etc("host1") / "ssh" / "ssh_host_ed25519_key.pub").read_text()
    known.write_text(f"host2 {other}")
    refused(set_up(hosts, "host2"), "host2: its key is not the one that is known", "ssh-keygen -R 'host2'")
    assert known.read_text() == f"host2 {other}"


def test_a_wrong_password_is_told(hosts: Cluster) -> None:
    (hosts.folder / "wrong").write_text("#!/bin/sh\necho wrong\n")
    (hosts.folder / "wrong").chmod(0o755)
    done = hosts.run(
        "host1", [hosts.folder / "setup.sh", *trusted(hosts), "host2"], user=USER, cwd="/",
        env={"SSH_ASKPASS": str(hosts.folder / "wrong"), "SSH_ASKPASS_REQUIRE": "force"},
    )  # fmt: skip
    refused(done, "host2: lets nobody in", "fix: give the right password")


@pytest.mark.parametrize(
    "name", ["host2;touch /tmp/x", "$(id)", "-oProxyCommand=id", "a b", "host2\n", "", "@host2", "a@b@c", "host2:22"]
)
def test_names_with_shell_characters_are_refused(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([SCRIPT, name], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and ("a host is a name" in done.stderr or "no such flag" in done.stderr)
    assert not list(tmp_path.iterdir()), "refused before anything is made"
