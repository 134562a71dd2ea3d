"""A job's ranks on this machine, however many: forked from one process that has imported their libraries.

They are processes on real Horovod, over Gloo and through shared memory, as in the job. They share the imported
libraries, so one more rank takes a second, and only its own memory. This module must not start threads before the last
fork, nor wait in a `finally` around it: a rank continues from there as the program.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.cluster.hosts.addresses import Chosen
from hvdtrain.cluster.hosts.hosts import Host, Slot, assign
from hvdtrain.cluster.launch import environment, processes, rendezvous
from hvdtrain.cluster.launch.failures import RankEnd
from hvdtrain.cluster.launch.running import places
from hvdtrain.comm.ring import FOLDER, read_ring
from hvdtrain.core import variables
from hvdtrain.core.slurm import port_of
from hvdtrain.world import startup

HERE = Chosen("lo", "127.0.0.1", "127.0.0.0/8")
# Their import is worth sharing, and does nothing that a program could want otherwise. Not keras: it takes its backend
# while it is imported, which the program may not have chosen yet.
SHARED = ("numpy", "torch", "torchvision", "tensorflow", "horovod.torch", "horovod.tensorflow", "scipy", "pandas")
_NEEDS = {
    "keras": "tensorflow",
    "horovod.keras": "tensorflow",
    "hvdtrain.keras": "tensorflow",
    "hvdtrain.torch": "torch",
    "hvdtrain.vision.classifiers": "torchvision",
}
_LAST_LINES = 40


def imported_by(source: str, keras_backend: str = "tensorflow") -> list[str]:
    """Returns which of `SHARED` a Python program imports, wherever in its text; pure."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name, needed in _NEEDS.items():
        if any(its == name or its.startswith(f"{name}.") for its in names):
            needed = keras_backend if needed == "tensorflow" and name != "horovod.keras" else needed
            names |= {needed, f"horovod.{needed}"}
    return [name for name in SHARED if any(its == name or its.startswith(f"{name}.") for its in names)]


def import_shared(names: Sequence[str]) -> None:
    """Imports what is installed of `names`, as a program's own start does: see `startup.import_modules`."""
    there = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    startup.import_modules(dict.fromkeys(there, ""))
    importlib.import_module("hvdtrain.world.join")


def slots_of(np: int, per_host: int) -> list[Slot]:
    """Returns the ranks' places on hosts that would each have `per_host` of them; pure."""
    count = -(-np // per_host)
    return assign([Host(f"rehearsed-{number}", per_host) for number in range(count)], np)


@dataclass
class Ranks:
    """The processes of `np` ranks; their output, and whatever hvdtrain writes for them, goes into `folder`."""

    np: int
    folder: Path
    number: int | None = None  # this process's rank; None: it is the ranks' parent
    pids: list[int] = field(default_factory=list)  # by rank
    ends: dict[int, RankEnd] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    _updates: dict[int, int] = field(default_factory=dict)

    def fork(self, slots: Sequence[Slot], environ: Mapping[str, str]) -> None:
        """Forks the ranks, with `environ` added to this process's environment; also returns in each rank."""
        processes.adopt_orphans()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))  # each has sockets to all
        server = rendezvous.serve(HERE.address, places(slots))
        job = environment.of_job(HERE, server.server_port, port_of(uuid.uuid4().hex)) | environment.of_host(HERE)
        job |= {variables.RUN_DIR: str(self.folder)}
        for slot in slots:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                self.number = slot.rank
                server.server_close()
                self._become({**environ, **job, **environment.of_rank(slot)})
                return
            self.pids.append(pid)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def _become(self, env: Mapping[str, str]) -> None:
        """Turns this process into a rank: session, signals, output, variables and seeds."""
        os.setsid()
        processes.die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        assert self.number is not None
        with open(os.devnull) as nothing, self.log(self.number).open("wb") as log:
            for source, target in ((nothing.fileno(), 0), (log.fileno(), 1), (log.fileno(), 2)):
                os.dup2(source, target)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.update(env)
        if "numpy" in sys.modules:  # seeded anew in each process that imports it; Python's random does so in a fork
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].seed()

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:04d}.log"

    def last_lines(self, rank: int) -> tuple[str, ...]:
        return tuple(self.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])

    def reap(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.ends:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    code, now_s = os.waitstatus_to_exitcode(status), time.monotonic()
                    lines = self.last_lines(rank) if code else ()
                    traced = now_s if any(line.startswith("Traceback (most recent") for line in lines) else None
                    self.ends[rank] = RankEnd(rank, "this machine", code, now_s, traced, lines)

    def updates(self) -> list[int]:
        """Returns how many updates each rank has reported."""
        for path in self.folder.rglob(f"{FOLDER}/rank-*.ring"):
            page = read_ring(path)
            if page is not None:
                rank = int(path.stem.removeprefix("rank-"))
                self._updates[rank] = max(self._updates.get(rank, 0), page["steps"])
        return [self._updates.get(rank, 0) for rank in range(self.np)]

    def end(self) -> None:
        """Ends all of them, and what they have started."""
        while left := processes.descendants(os.getpid()):
            processes.send(left, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(processes.TICK_S)
