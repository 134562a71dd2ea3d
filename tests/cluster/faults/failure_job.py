"""A job on two hosts that something befalls, what it leaves, and what becomes of it: a row of docs/failures.md."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from cluster_hosts import Cluster
from cluster_procfs import command_of
from harness import PROGRAMS
from ledger import History, miscounted, verdict

PROGRAM = PROGRAMS / "failures" / "train.py"
SAMPLES, EPOCHS, PER_RANK = 403, 2, 4  # as the program has them
HISTORY = History("torch", 0, "dataset", SAMPLES, EPOCHS, "weighted", "sgd", 1, False, False, ())
START_S = 300  # until ranks have imported their framework, on a machine that may starve them


@dataclass
class Job:
    """Two ranks, one a host as a rule, that train in a folder; each start is another life of the same training."""

    c: Cluster
    folder: Path
    fault: str = ""
    launcher: str = "hvdtrain launch"
    hosts: str = "host1:1,host2:1"
    np: int = 2
    pace_s: float = 0.1
    life: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Starts the next life, on host1."""
        self.life += 1
        program = [sys.executable, str(PROGRAM), str(self.folder), str(self.life), str(self.pace_s), self.fault]
        line = {
            "hvdtrain launch": ["--log-dir", f"{self.folder}/logs.{self.life}", "--start-timeout", "90", *flags, "--"],
            "horovodrun": ["--gloo", "--network-interfaces", "eth0", *flags],
            "mpirun": ["-x", "PATH", "-x", "PYTHONPATH", "-x", "HVDTRAIN_HANG_S", *flags],
        }[self.launcher]
        started = [*self.launcher.split(), "-np", str(self.np), "-H", self.hosts, *line, *program]
        own = self.launcher == "hvdtrain launch"
        # waiting ranks of Open MPI spin, which starves those that compute where ranks outnumber cores
        env = {} if own else {"HVDTRAIN_HANG_S": "5", "OMPI_MCA_mpi_yield_when_idle": "1"}
        with self.output.open("wb") as output:
            self.process = self.c.popen(
                "host1", started, env=env, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> Path:
        return self.folder / f"output.{self.life}"

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def until(self, what: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Waits for what is told by no event."""
        start = time.monotonic()
        while not what():
            assert self.running.poll() is None, f"the launcher has ended\n{self.text}"
            assert time.monotonic() - start < timeout_s, f"not after {timeout_s} s\n{self.text}"
            time.sleep(0.05)

    def trained(self, more: int) -> None:
        """Waits for so many updates more, by any rank."""
        wanted = len(applied_s(self.folder)) + more
        self.until(lambda: len(applied_s(self.folder)) >= wanted)

    def happens(self) -> None:
        """Notes that the fault comes now."""
        (self.folder / "fault").write_text(str(time.monotonic()))

    @property
    def happened_s(self) -> float:
        return float((self.folder / "fault").read_text())

    def processes(self, host: str, *words: str) -> list[psutil.Process]:
        """What runs there with all of these words in its command, the oldest first."""
        found = [its for its in self.c.pids(host) if all(word in command_of(its, whole=True) for word in words)]
        return sorted(found, key=lambda its: (its.create_time(), its.pid))

    def ended(self, timeout_s: float) -> tuple[int, float, list[str]]:
        """Waits for the end; returns the launcher's exit code, when nothing ran on any host any more, and what was
        left all the same."""
        try:
            code = self.running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {timeout_s} s; {self.c.running()}\n{self.text}") from None
        left = self.c.left_after(30)
        return code, time.monotonic(), left

    def attempts(self) -> list[dict[str, Any]]:
        file = self.folder / f"logs.{self.life}" / "launch.json"
        return json.loads(file.read_text())["attempts"] if file.exists() else []


# ---- what the ranks have noted


def _lines(folder: Path) -> dict[tuple[int, int], list[list[dict[str, Any]]]]:
    """By attempt: what each of its processes has noted."""
    found: dict[tuple[int, int], list[list[dict[str, Any]]]] = defaultdict(list)
    for file in folder.glob("ledger.*"):
        life, restarts = map(int, file.name.split(".")[1:3])
        whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[life, restarts].append([json.loads(line) for line in whole])
    return dict(sorted(found.items()))


def applied_s(folder: Path) -> list[float]:
    """When updates were completed, in order; each once, however many ranks say so."""
    first: dict[tuple[int, int, int], float] = {}
    for attempt, files in _lines(folder).items():
        for line in (line for lines in files for line in lines if line["kind"] == "applied"):
            key = (*attempt, line["update"])
            first[key] = min(first.get(key, line["at_s"]), line["at_s"])
    return sorted(first.values())


def updates_in_the_weights(folder: Path, batch: int) -> list[dict[str, Any]]:
    """Those that no later attempt has done anew, in order."""
    kept: dict[int, dict[str, Any]] = {}
    for attempt, files in _lines(folder).items():
        began = min((line["at_s"], line["update"]) for lines in files for line in lines if line["kind"] == "began")[1]
        kept = {number: its for number, its in kept.items() if number <= began}
        assert sorted(kept) == list(range(1, began + 1)), f"{attempt} goes on after update {began}, of {sorted(kept)}"
        took: dict[tuple[int, int], list[int]] = defaultdict(list)
        done: dict[int, dict[str, Any]] = {}
        for lines in files:
            mine: dict[int, dict[str, Any]] = {}
            for line in lines:
                if line["kind"] == "took":
                    mine[line["update"]] = line
                    took[line["update"], line["formation"]] += line["ids"]
                elif line["kind"] == "applied":
                    done[line["update"]] = {**mine[line["update"]], "lr": line["lr"]}
        for number, its in done.items():
            kept[number] = {**its, "steps": [took[number, its["formation"]]], "unit": 0, "global": batch}
    assert sorted(kept) == list(range(1, len(kept) + 1)), sorted(kept)
    return [kept[number] for number in sorted(kept)]


def judged(folder: Path, np: int) -> tuple[int, list[str]]:
    """How many samples were skipped or repeated, and what is wrong with them, the rates and the weights."""
    updates = updates_in_the_weights(folder, np * PER_RANK)
    lost = sum(len(repeated) + len(skipped) for repeated, skipped in miscounted(HISTORY, updates).values())
    return lost, verdict(HISTORY, updates, json.loads((folder / "weights.json").read_text()))[0]
