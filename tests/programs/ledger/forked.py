"""Lives histories of `support/ledger.py` on real ranks: a process a rank, forked, killed by SIGKILL, forked again.

usage: of_torch.py (of_keras.py) FOLDER ADAPTER NUMBER ...    writes FOLDER/NUMBER
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ledger import History, Life, history

import hvdtrain
from hvdtrain.cluster.launch.rendezvous import serve

Train = Callable[["Job"], None]
LONGEST_S = 100
KILLED = "killed"  # a file of a life of which a rank was about to kill itself


class Job:
    """One rank of one life; `train` of an adapter's file takes it through.

    Attributes:
        folder: of the history.
    """

    def __init__(self, of: History, number: int, rank: int, folder: Path) -> None:
        self.history, self.life, self.rank, self.folder = of, of.lives[number], rank, folder
        self.own = folder / f"life{number}"
        self._updates = 0
        self._lines = open(self.own / f"rank{rank}.jsonl", "a", buffering=1)  # noqa: SIM115 (until it is killed)
        self.batches: list[list[int]] = []

    def begins(self, world: Any, step: int, global_batch: int, unit: int) -> None:
        if world.is_main:
            its = {"step": step, "size": world.size, "global": global_batch, "unit": unit}
            (self.own / "began.json").write_text(json.dumps(its))

    def note(self, update: int, epoch: int, lr: float) -> None:
        """An update is in the weights, of what was added to `batches`."""
        self._updates += 1
        self._lines.write(json.dumps({"update": update, "epoch": epoch, "lr": lr, "batches": self.batches}) + "\n")
        self.batches = []

    def at(self, end: str, count: int | None = None) -> bool:
        """Dies here, if that is how this life ends; returns whether to leave here.

        Args:
            end: one of `ENDS`.
            count: of epochs; by default of updates that are done.
        """
        life = self.life
        if (life.end, life.at) != (end, self._updates if count is None else count):
            return False
        if end == "left":
            return True
        if life.first in (-1, self.rank):
            (self.own / KILLED).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return False  # it is killed when the other has died, wherever it is then

    def ends(self, world: Any, weights: list[Any]) -> None:
        """The training is through."""
        if world.is_main:
            (self.folder / "weights.json").write_text(json.dumps([w.tolist() for w in weights]))


def forked(run: Callable[[], None], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        with open(output, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    hvdtrain.core.errors.end_now(code)
    raise AssertionError("it has ended")


def live(of: History, number: int, folder: Path, train: Train) -> str:
    """Lives one life; returns what went wrong by itself."""
    life = of.lives[number]
    (folder / f"life{number}").mkdir()
    output = folder / f"life{number}" / "output.txt"
    size = life.size
    meets = size > 1 and life.engine == "horovod"
    server = serve("127.0.0.1", [("localhost", r, r, 0, size, size, 1) for r in range(size)]) if meets else None
    port = server.server_port if server is not None else free_port()
    helper = forked(server.serve_forever, output) if server is not None else None
    ranks: dict[int, int] = {}
    for rank in range(size):

        def run(rank: int = rank) -> None:
            if server is not None:
                server.server_close()
            if size > 1:
                os.environ |= _variables(life.engine, rank, size, port)
            train(Job(of, number, rank, folder))

        ranks[forked(run, output)] = rank
    if server is not None:
        server.server_close()
    try:
        return _waited(life, ranks, folder / f"life{number}")
    finally:
        if helper is not None:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _variables(engine: str, rank: int, size: int, port: int) -> dict[str, str]:
    if engine == "ddp":
        return {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "ledger",
        }  # fmt: skip
    return {
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size), "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size), "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port), "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }  # fmt: skip


def _waited(life: Life, ranks: dict[int, int], own: Path) -> str:
    """Waits for all ranks, of which one that ends otherwise than well takes the others along, as under a launcher."""
    left, codes = dict(ranks), {}
    while left:
        pid, status = os.wait()
        if pid not in left:
            continue
        code = os.waitstatus_to_exitcode(status)
        codes[left.pop(pid)] = code
        if code == 0:
            continue
        if life.with_writer and code == -signal.SIGKILL:
            _kill_group(pid)
        for other in left:
            (_kill_group if life.with_writer else _kill)(other)
    # the others may have failed of it, and be waited for, before the rank that killed itself is
    if any(codes.values()) and not (own / KILLED).exists():
        return f"ended with {codes}:\n{(own / 'output.txt').read_text(errors='replace')}"
    return ""


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # it was not waited for: its number is its own


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def lived(of: History, folder: Path, train: Train) -> str:
    """Lives a history to its end, and once more in one piece where its lives are alike; returns what went wrong."""
    folder.mkdir(parents=True)
    for number in range(len(of.lives)):
        failure = live(of, number, folder, train)
        if failure:
            (folder / "failed.txt").write_text(f"life {number} {failure}")
            return failure
        if (folder / "weights.json").exists():
            break
    # Keras' accumulation is open where a checkpoint may be taken, which then holds the ranks' mean of it
    if not of.resized and (of.adapter == "torch" or of.accumulate == 1):
        return lived(replace(of, resized=True, lives=of.lives[-1:]), folder / "unbroken", train)
    return ""


def load_what_it_loads(adapter: str, train: Train) -> None:
    """Imports what a rank imports on its way, once for all that are forked."""
    with tempfile.TemporaryDirectory() as folder:
        modules = Path(folder) / "modules.json"

        def noted(job: Job) -> None:
            train(job)
            modules.write_text(json.dumps(list(sys.modules)))

        of = history(adapter, 0)
        failure = lived(replace(of, lives=of.lives[-1:], resized=True), Path(folder) / "0", noted)
        if failure:
            raise SystemExit(failure)
        for name in json.loads(modules.read_text()):
            if name.startswith("hvdtrain") or name in ("tensorflow", "torch"):
                importlib.import_module(name)


def main(train: Train) -> None:
    folder, adapter, numbers = Path(sys.argv[1]), sys.argv[2], [int(text) for text in sys.argv[3:]]
    load_what_it_loads(adapter, train)
    for number in numbers:
        lived(history(adapter, number), folder / str(number), train)
