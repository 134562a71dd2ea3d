"""Ranks that add up without an end, one of which is killed, or stopped, at a random instant, again and again.

All others must be told within seconds, whatever they were doing, and nothing may be left of the memory they shared.
Ranks are forks of this process, so that each life takes as long as Horovod's start. Arguments: how often, the hosts
(`a:2,b:1`: by name only), `kill` or `stop`.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

TOLD_WITHIN_S = 10.0
STOPPED_S = 2
RUN = os.environ.get("HVDTRAIN_TEST_RUN", "")


def rank(slot: SlotInfo, port: int, pipe: int) -> None:
    """One rank's life: says that sums go on, then what it was told."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hostname")
    os.environ |= {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in names}
    os.environ |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(STOPPED_S), "HOROVOD_CYCLE_TIME": "0.1",
    }  # fmt: skip
    hvd.init()
    tensors = [torch.ones(size) for size in (1 << 22, 3, 1 << 17)]
    os.write(pipe, b'"sums"\n')
    try:
        for number in range(1_000_000):
            for tensor in tensors:
                hvd.allreduce_(tensor, op=hvd.Average, name=f"sum.{number % 5}")
                assert bool((tensor == 1).all()), (number, tensor)
    except HorovodInternalError as error:
        os.write(pipe, json.dumps(str(error)).encode() + b"\n")


def life(hosts: str, how: str) -> list[str]:
    """Returns what the other ranks were told."""
    count = sum(int(host.split(":")[1]) for host in hosts.split(","))
    slots = get_host_assignments(parse_hosts(hosts), count)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    pids, pipes = [], []
    for slot in slots:
        ours, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                rank(slot, port, its)
            finally:
                os._exit(0)
        os.close(its)
        pids.append(pid)
        pipes.append(os.fdopen(ours, "rb", buffering=0))
    try:
        assert all(said(pipe, 60) == "sums" for pipe in pipes)
        select.select([], [], [], random.uniform(0, 0.05))  # the instant
        victim = random.randrange(count)
        os.kill(pids[victim], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        told = [said(pipe, TOLD_WITHIN_S) for at, pipe in enumerate(pipes) if at != victim]
        if how == "stop":  # it finds that the others went on without it
            os.kill(pids[victim], signal.SIGCONT)
            told.append(said(pipes[victim], TOLD_WITHIN_S))
        return told
    finally:
        for pid, pipe in zip(pids, pipes, strict=True):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()
        server.stop()


def said(pipe: object, within_s: float) -> str:
    line, end_s = b"", time.monotonic() + within_s
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, f"nothing was said within {within_s} s"
        some = os.read(pipe.fileno(), 1 << 16)
        assert some, f"it ended without a word after {line!r}"
        line += some
    return str(json.loads(line))


def left() -> list[str]:
    """Shared memory that a process of this run still holds, or that lies around."""
    held = [
        str(its)
        for its in Path("/proc").glob("[0-9]*")
        if "memfd:horovod" in text_of(its / "maps") and RUN in text_of(its / "environ")
    ]
    return held + [its.name for its in Path("/dev/shm").iterdir() if "horovod" in its.name]


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended meanwhile
        return ""


def main(times: int, hosts: str, how: str) -> None:
    random.seed(4)
    torch.set_num_threads(1)
    told: Counter[str] = Counter()
    for _ in range(times):
        for text in life(hosts, how):
            told["shared memory" if "shared memory" in text else "sockets"] += 1
    assert not left(), left()
    print(f"told: {dict(told)}")


main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
