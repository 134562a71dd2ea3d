"""Hosts whose log-in is not as it should be: what start-up files of a shell do, and keys that ssh cannot use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_breakages import changed, sh
from cluster_hosts import Cluster, cluster
from harness import PROGRAMS, Result

TOY = PROGRAMS / "cluster" / "toy.py"
HOSTS = ["-H", "host1:1,host2:1"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2) as c:
        yield c


def launch(c: Cluster, folder: Path, *flags: str) -> Result:
    command = [sys.executable, str(TOY), "*:say:hello"]
    line = ["hvdtrain", "launch", *HOSTS, "--log-dir", str(folder / "logs"), *flags, "--", *command]
    done = c.run("host1", line, cwd=folder, timeout_s=120)
    assert c.left_after(3) == [], done.text
    return done


def refused(c: Cluster, folder: Path) -> str:
    """What the launcher says, and the doctor, in one line."""
    done = launch(c, folder, "--no-checks", "--start-timeout", "3")
    assert done.returncode == 2, done.text
    examined = c.run("host1", ["hvdtrain", "doctor", "--fast", "--timeout", "3", *HOSTS])
    assert examined.returncode == 2, examined.text
    return " ".join(f"{done.err} {examined.out}".split())


@pytest.mark.parametrize("line", [r"printf '\036{}\n\036[]'", "read -t 0.3 -N 100000 line"])
def test_nothing_that_a_log_in_prints_or_reads_is_in_the_way(hosts: Cluster, tmp_path: Path, line: str) -> None:
    with changed(hosts.home("host2") / ".bashrc", lambda text: f"{line}\n{text}"):
        done = launch(hosts, tmp_path).check()
    assert "[1 host2] hello" in done.out


def test_start_up_files_are_named_where_no_command_comes_through(hosts: Cluster, tmp_path: Path) -> None:
    with changed(hosts.home("host2") / ".bashrc", lambda text: f"cat > /dev/null\n{text}"):
        said = refused(hosts, tmp_path)
    assert said.count("host2 accepted the log-in, but its shell did not start the command") == 2, said
    assert "ssh-start-up-files: host2" in said and "~/.bashrc" in said and "MTU" not in said, said


def test_start_up_files_that_end_the_shell_are_named(hosts: Cluster, tmp_path: Path) -> None:
    with changed(hosts.home("host2") / ".bashrc", lambda text: f"exit 1\n{text}"):
        said = refused(hosts, tmp_path)
    assert said.count("start-up file there ends the shell (~/.bashrc)") == 2, said


@pytest.mark.thorough
def test_a_key_that_others_can_read_is_named(hosts: Cluster, tmp_path: Path) -> None:
    key = f"{hosts.home_inside('host1')}/.ssh/id_ed25519"
    sh(hosts, "host1", f"chmod 644 {key}")
    try:
        said = refused(hosts, tmp_path)
    finally:
        sh(hosts, "host1", f"chmod 600 {key}")
    assert f"ssh cannot use this user's key for host2: {key} is readable by other users" in said, said
    assert f"chmod 600 {key}" in said and "ssh_setup" not in said, said


@pytest.mark.thorough
def test_a_key_with_a_passphrase_is_named(hosts: Cluster, tmp_path: Path) -> None:
    key = f"{hosts.home_inside('host1')}/.ssh/id_ed25519"
    sh(hosts, "host1", f"ssh-keygen -q -p -N 'open sesame' -f {key}")
    try:
        said = refused(hosts, tmp_path)
    finally:
        sh(hosts, "host1", f"ssh-keygen -q -p -P 'open sesame' -N '' -f {key}")
    assert f"ssh cannot use this user's key for host2: {key} needs a passphrase" in said, said
    assert f"ssh-add {key}" in said and "ssh_setup" not in said, said


@pytest.mark.thorough
def test_a_key_that_the_host_does_not_know_is_told_from_one_that_is_not_used(hosts: Cluster, tmp_path: Path) -> None:
    """A key that was offered and one that was not: either may be the one that is meant."""
    with changed(hosts.home("host2") / ".ssh" / "authorized_keys", lambda text: ""):
        said = refused(hosts, tmp_path)
        assert "host2 does not accept this user's key" in said and "not used" not in said, said
        other = f"{hosts.home_inside('host1')}/.ssh/id_rsa"
        sh(hosts, "host1", f"ssh-keygen -q -t rsa -N secret -f {other}")
        try:
            said = refused(hosts, tmp_path)
        finally:
            sh(hosts, "host1", f"rm {other} {other}.pub")
    assert "host2 does not accept this user's key" in said and f"not used: {other} needs a passphrase" in said, said
    assert "ssh-copy-id host2" in said and f"ssh-add {other}" in said, said


def test_a_key_that_is_not_there_starts_nothing(hosts: Cluster, tmp_path: Path) -> None:
    """ssh itself would use another key."""
    done = launch(hosts, tmp_path, "--identity", "/no/such/key")
    assert done.returncode == 2 and "--identity must name a private key that can be read" in done.err, done.text
    assert not done.out and not (tmp_path / "logs").exists()
