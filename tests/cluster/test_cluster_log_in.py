"""Hosts whose log-in is not as it should be: what start-up files of a shell do, and keys that ssh cannot use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_breakages import changed
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


def test_a_key_that_is_not_there_starts_nothing(hosts: Cluster, tmp_path: Path) -> None:
    """ssh itself would use another key."""
    done = launch(hosts, tmp_path, "--identity", "/no/such/key")
    assert done.returncode == 2 and "--identity must name a private key that can be read" in done.err, done.text
    assert not done.out and not (tmp_path / "logs").exists()
