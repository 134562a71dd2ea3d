"""A worker of an elastic job that speaks the line by itself: `elastic.py F.K SECONDS [RANK:F.K:WHAT ...]`.

It sums ones over the ranks, update for update with SECONDS between, goes on when others are lost, and ends after update
K of formation F. RANK (or "*") does WHAT before that update (0: before it meets the others): "raise", "kill" (itself),
"exit=N" or "stop" (SIGSTOP).
"""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdtrain.comm.arrival import Rendezvous, wait_for_all
from hvdtrain.core.errors import LauncherError

LINE = socket.socket(fileno=int(os.environ["HVDTRAIN_AGENT_FD"]))
NEW = os.environ.get("HVDTRAIN_ELASTIC") == "new"


class Line:
    """What the launcher says: `forms` waits, `regroup` is a flag, `abort` is done at once."""

    def __init__(self) -> None:
        self.forms: queue.Queue[dict[str, Any]] = queue.Queue()
        self.formation = 0 if NEW else 1
        self.regroup = 0
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, **said: Any) -> None:
        LINE.sendall(json.dumps(said).encode() + b"\n")

    def _read(self) -> None:
        with LINE.makefile("r") as lines:
            for line in lines:
                said = json.loads(line)
                if said["do"] == "form":
                    self.forms.put(said)
                elif said["do"] == "regroup":
                    self.regroup = said["formation"]
                elif said["do"] == "abort" and said["formation"] == self.formation:
                    break_connections()


def break_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number == LINE.fileno() or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it is gone, or was never connected


def enter(line: Line) -> None:
    """Wait for the next formation."""
    line.say(do="wait", formation=line.formation)
    form = line.forms.get()
    for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        os.environ[f"HOROVOD_{name.upper()}"] = str(form[name])
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = form["address"]
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(form["port"])
    line.formation = form["formation"]


def meet(line: Line) -> None:
    act(f"{line.formation}.0")
    # before Horovod does: it ends the process where one of those that meet is lost
    address = ":".join(os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    wait_for_all(Rendezvous(address), int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]), 60.0)
    hvd.init()
    places = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    print("formation", line.formation, "rank", *places, flush=True)


def act(place: str) -> None:
    for todo in sys.argv[3:]:
        who, at, what = todo.split(":")
        if who in ("*", os.environ["HOROVOD_RANK"]) and at == place:
            print("doing", what, time.time(), flush=True)
            if what == "raise":
                raise ValueError(f"rank {who} at update {at}")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what.startswith("exit="):
                sys.exit(int(what.removeprefix("exit=")))


def train(line: Line, update: torch.Tensor, until: tuple[int, int], seconds: float) -> bool:
    """Train in the present formation; return whether that was all."""
    said_s, done = 0.0, 0
    update.copy_(hvd.broadcast(update, 0, name="update"))
    while (line.formation, done) < until:
        act(f"{line.formation}.{done + 1}")
        leaves = float(line.regroup == line.formation)
        summed = hvd.allreduce(torch.tensor([1.0, leaves]), op=hvd.Sum, name="sum")
        assert int(summed[0]) == hvd.size(), summed
        update += 1
        done += 1
        if done == 1:
            print("first", line.formation, int(update), time.time(), flush=True)
            if line.formation == 1 and hvd.rank() == 0:
                line.say(do="answers", data=base64.b64encode(b"what rank 0 ").decode(), last=False)
                line.say(do="answers", data=base64.b64encode(b"recorded").decode(), last=True)
        if time.monotonic() - said_s >= 1:
            said_s = time.monotonic()
            line.say(do="updates", count=int(update), formation=line.formation)
        if summed[1]:
            return False
        time.sleep(seconds)
    return True


def main() -> None:
    formation, _, done = sys.argv[1].partition(".")
    line, update = Line(), torch.zeros(1)
    if NEW:
        print("answers", Path(os.environ["HVDTRAIN_ELASTIC_ANSWERS"]).read_text(), flush=True)
        enter(line)
    over = False
    while not over:
        try:
            meet(line)
            over = train(line, update, (int(formation), int(done)), float(sys.argv[2]))
        except (HorovodInternalError, LauncherError):
            print("broken", line.formation, time.time(), flush=True)
        hvd.shutdown()
        if not over:
            print("left", line.formation, time.time(), flush=True)
            enter(line)
    print("done", int(update), flush=True)


main()
