"""`hvdtrain launch` of elastic jobs: workers and hosts are lost and come, and the others go on, over Horovod's Gloo."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_procfs import command_of, is_zombie_or_sshd
from elastic_ledgers import trained_in
from harness import PROGRAMS
from test_cluster_ends import wait_for
from test_cluster_launch import Ended, Launched, launched

from hvdtrain.cluster.hosts.hosts import Host
from hvdtrain.cluster.launch.discovery import asked, command_in
from hvdtrain.core.errors import ConfigError

WORKER = PROGRAMS / "cluster/elastic.py"
GOES_ON_WITHIN_S = 20.0  # from the loss to the survivors' next sum; 0.6 s, where others leave the processes room


def run(folder: Path, until: str, *arguments: str, np: int = 3) -> Ended:
    flags = [argument for argument in arguments if argument.startswith("-")]
    todo = [argument for argument in arguments if not argument.startswith("-")]
    with launched(folder, *flags, until, "0.05", *todo, np=np, program=WORKER) as started:
        return started.end()


def reader(started: Launched) -> Callable[[], str]:
    """What the launcher has said on standard error so far."""
    assert started.process.stderr is not None
    os.set_blocking(started.process.stderr.fileno(), False)
    text = ""

    def read() -> str:
        nonlocal text
        with contextlib.suppress(BlockingIOError):
            text += os.read(started.process.stderr.fileno(), 1 << 16).decode()
        return text

    return read


def attempt(folder: Path) -> dict[str, Any]:
    (only,) = json.loads((folder / "runs/launch-1/launch.json").read_text())["attempts"]
    return only


@dataclass
class Trained:
    """What a training has left.

    Attributes:
        updates: of each update: epoch, and the samples of all that took part.
        formations: the workers of each, after the first one.
        times_s: of all updates.
    """

    folder: Path
    ended: Ended
    updates: dict[int, tuple[int, list[int]]]
    formations: list[list[int]]
    times_s: list[float]

    @property
    def sizes(self) -> list[int]:
        return [len(workers) for workers in self.formations]

    def recorded(self, kind: str, what: str) -> list[int]:
        """That number of the run's events of a kind."""
        record = self.folder / "run"
        assert json.loads((record / "run.json").read_text())["status"] == "finished"
        events = [json.loads(line) for line in (record / "events.jsonl").read_text().splitlines()]
        return [its[what] for its in events if its["kind"] == kind]


def read(folder: Path, ended: Ended) -> Trained:
    assert ended.code == 0, ended.text
    updates, times_s = trained_in(folder)
    return Trained(folder, ended, updates, [its["workers"] for its in attempt(folder)["formations"]], times_s)


def lose_at_random(
    started: Launched, events: int, living: Callable[[list[float]], list[psutil.Process]]
) -> tuple[Trained, int, float]:
    """Kills any of the living at any time, as long as one is left, of whom there are four again each time; `living`
    knows when others were killed. Returns what is left, how often ranks joined, and the median time to an update."""
    draw, lost_s = random.Random(5), list[float]()
    told = reader(started)  # or its pipe is full some day
    while started.process.poll() is None and len(lost_s) < events:
        told()
        # waits for nothing: the instants of the losses are what is tried
        time.sleep(draw.choice([0.2, 0.5, 1.0, 3.0]))
        if len(found := living(lost_s)) > 1:
            lost_s.append(time.time())
            draw.choice(found).kill()
    done = read(started.folder, started.end(600))
    waited_s = statistics.median(min(at for at in done.times_s if at > lost) - lost for lost in lost_s)
    grown = sum(after > before for before, after in pairwise([4, *done.sizes]))
    print(f"{len(lost_s)} losses, {grown} times ranks joined, to the next update {waited_s:.2f} s")
    assert grown and len(lost_s) + grown >= events
    return done, len(lost_s), waited_s


def seconds_without(text: str, formation: int) -> float:
    """From what happened to a member of a formation to the first sum of the next."""
    (last,) = re.findall(rf"doing \w+ (\S+)\n(?:(?!doing)[^\n]*\n)*?[^\n]* formation {formation + 1} rank", text)
    (first, *_) = re.findall(rf"first {formation + 1} \d+ (\S+)", text)
    return float(first) - float(last)


@pytest.mark.thorough
def test_ranks_are_lost_and_replaced_and_the_others_go_on(tmp_path):
    """One that is not rank 0, then rank 0; each time the others sum again at once, and then with a new one."""
    ended = run(tmp_path, "5.5", "--min-np=2", "1:1.20:kill", "0:3.5:kill")
    assert ended.code == 0, ended.text
    found = attempt(tmp_path)
    assert [its["workers"] for its in found["formations"]] == [[0, 2], [0, 2, 3], [2, 3], [2, 3, 4]], ended.text
    assert [(its["worker"], its["formation"]) for its in found["lost"]] == [(1, 1), (0, 3)]
    assert "worker 1 on localhost lost: ended by SIGKILL" in ended.err
    assert "continuing with 2 ranks (formation 2; localhost: 2)" in ended.err
    updates = [int(line.split()[2]) for line in ended.of(2) if line.startswith("first")]
    assert updates == sorted(updates) and updates[1] == 20, "the update that was not done is done again"
    assert ended.of(3)[0] == "answers what rank 0 recorded"
    done = {line for number in (2, 3, 4) for line in ended.of(number) if line.startswith("done")}
    assert len(done) == 1, "who joined knows where the others are"
    waited = [seconds_without(ended.out, formation) for formation in (1, 3)]
    assert max(waited) < GOES_ON_WITHIN_S, waited


@pytest.mark.thorough
def test_a_rank_that_is_stopped_is_left(tmp_path):
    ended = run(tmp_path, "3.5", "--max-np=3", "--stopped-after=1", "1:1.10:stop")
    assert ended.code == 0, ended.text
    assert [its["workers"] for its in attempt(tmp_path)["formations"]] == [[0, 2], [0, 2, 3]]
    assert "worker 1 on localhost lost: stopped by a signal" in ended.err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("todo", "flags", "code", "said"),
    [
        (("1:1.10:exit=2",), ("--min-np=1",), 2, "rank 1 on localhost failed first"),
        (("*:1.10:raise",), ("--min-np=1",), 1, "no worker of formation 1 remains"),
        (("1:1.10:exit=3",), ("--min-np=3", "--elastic-timeout=0"), 3, "fewer than 3 workers (--min-np) remain"),
    ],
)
def test_what_ends_an_elastic_job(tmp_path, todo, flags, code, said):
    ended = run(tmp_path, "2.5", *flags, *todo)
    assert ended.code == code and said in ended.err, ended.text
    assert attempt(tmp_path)["failure"]["why"]


def test_what_a_discovery_prints():
    assert asked(["printf", " host1:2\\n\\nhost2\\n"]) == [Host("host1", 2), Host("host2", 1)]
    assert asked(["true"]) == []


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("echo no such cloud >&2; exit 4", "exit code 4: no such cloud"),
        ("echo 'host1:2 up'", "host1"),
        ("sleep 60.14159 & wait", "not done in 0.5 s"),
    ],
)
def test_a_discovery_that_prints_no_hosts_is_told(script, what):
    with pytest.raises(ConfigError) as error:
        asked(["sh", "-c", script], timeout_s=0.5)
    assert what in error.value.received
    left = [its for its in psutil.process_iter() if command_of(its) == "sleep 60.14159"]
    assert all(map(is_zombie_or_sshd, psutil.wait_procs(left, timeout=30)[1])), "what it started is left"


@pytest.mark.parametrize("text", ["", "  ", "sh 'hosts"])
def test_a_discovery_is_a_command(text):
    with pytest.raises(ConfigError):
        command_in(text)


@pytest.mark.thorough
def test_slots_come_and_go_as_the_discovery_says(tmp_path):
    """Also where the script fails for a while, hangs, or says nonsense: then the hosts stay as they are."""
    hosts, script = tmp_path / "hosts", tmp_path / "hosts.sh"
    hosts.write_text("localhost:2\n")
    script.write_text(f". {tmp_path}/before; cat {hosts}\n")
    (tmp_path / "before").write_text("")
    command = ["--max-np=3", f"--host-discovery=sh {script}", "--grace=1", "3.40", "0.05"]
    with launched(tmp_path, *command, np=2, program=WORKER) as started:
        started.until("[0 localhost] first 1")
        (tmp_path / "before").write_text("echo there are none; exit 3\n")
        told = reader(started)
        wait_for(lambda: "exit code 3" in told())
        hosts.write_text("localhost:3\n")
        (tmp_path / "before").write_text("")
        started.until("[0 localhost] first 2")
        hosts.write_text("localhost:1\n")
        started.until("[0 localhost] first 3", "[0 localhost] done")
        assert started.process.wait(20) == 0
    found = attempt(tmp_path)["formations"]
    assert [its["workers"] for its in found] == [[0, 1, 2], [0]] and not attempt(tmp_path)["lost"]
