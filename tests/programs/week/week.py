"""A week in minutes: a small training that is broken again and again, in random ways, until it is through.

Usage: week.py FOLDER FAULTS [SEED]. `hvdtrain launch --max-restarts` starts the ranks again; where the launcher itself
is broken, or preempted, it is started again as a scheduler would, on 1 to 3 ranks. Prints what was done, and how far
the weights are from those of plain PyTorch in one process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from harness import TOKEN, processes_of
from train import BATCH, SAMPLES, build, samples

FOLDER, FAULTS, SEED = Path(sys.argv[1]), int(sys.argv[2]), int((sys.argv[3:] or ["1"])[0])
RATE, PER_EPOCH, PATIENCE_S = 40, SAMPLES // BATCH, 120
TRAIN, WRITER, AGENT = (
    str(Path(__file__).with_name("train.py")),
    "hvdtrain.checkpoint.writer",
    "hvdtrain.cluster.launch.agent",
)
DRAW = random.Random(SEED)


class Job:
    """The launcher that runs, and what belongs to it."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.starts = epochs, 0
        self.token = os.environ.get(TOKEN) or f"week-{os.getpid()}"
        self.output = (FOLDER / "output").open("ab")
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.np = DRAW.choice([1, 2, 2, 3])
        flags = ["--max-restarts", "8", "--restart-wait", "60", "--hang-timeout", "5", "--grace", "5", "--no-checks"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain", "launch", "-np", str(self.np), *flags, "--",
             sys.executable, TRAIN, str(FOLDER), str(self.epochs), str(RATE)],
            cwd=FOLDER, env={**os.environ, TOKEN: self.token}, stdout=self.output, stderr=self.output,
        )  # fmt: skip

    def living(self) -> list[psutil.Process]:
        return [its for its in processes_of(self.token) if its.pid != os.getpid()]

    def ended(self, within_s: float) -> None:
        """Nothing of it is left."""
        psutil.wait_procs(self.living(), timeout=within_s)
        left = self.living()
        assert not left, [its.cmdline() for its in left]

    def having(self, part: str) -> list[psutil.Process]:
        """Those whose command has this part, or no process that is still there."""
        found = []
        for process in self.living():
            try:
                if part in " ".join(process.cmdline()) and process.pid != self.process.pid:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        return [its for its in self.having(TRAIN) if WRITER not in " ".join(its.cmdline())]

    def updates(self) -> int:
        """How many were done, those that were done again among them."""
        file = FOLDER / "updates"
        return file.read_bytes().count(b"\n") if file.exists() else 0


def send(number: int, some: list[psutil.Process]) -> bool:
    for process in some:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
    return bool(some)


def one(some: list[psutil.Process]) -> list[psutil.Process]:
    return [DRAW.choice(some)] if some else []


def broken(how: str) -> Callable[[Job], bool]:
    def fault(job: Job) -> bool:
        (FOLDER / "break").write_text(how)
        return True

    return fault


def damaged(job: Job) -> bool:
    """The newest checkpoint has a bit flipped when the job goes on from it."""
    newest = max((FOLDER / "checkpoints").glob("epoch-*/*.pt"), key=lambda file: file.stat().st_mtime, default=None)
    if newest is None or not send(signal.SIGKILL, job.ranks()):
        return False
    data = bytearray(newest.read_bytes())
    data[DRAW.randrange(len(data))] ^= 1 << DRAW.randrange(8)
    newest.write_bytes(data)
    return True


def launcher(number: int) -> Callable[[Job], bool]:
    """The launcher gets a signal; when it has ended, another one is started."""

    def fault(job: Job) -> bool:
        job.process.send_signal(number)
        code = job.process.wait(PATIENCE_S)
        assert code != 0, "it is not through"
        job.ended(20)
        job.start()
        return True

    return fault


KINDS: dict[str, tuple[int, Callable[[Job], bool]]] = {  # how often, and what
    "a rank, SIGKILL": (6, lambda job: send(signal.SIGKILL, one(job.ranks()))),
    "all ranks, SIGKILL": (3, lambda job: send(signal.SIGKILL, job.ranks())),
    "ranks and writers, SIGKILL": (3, lambda job: send(signal.SIGKILL, job.having(TRAIN) + job.having(WRITER))),
    "the agent, SIGKILL": (2, lambda job: send(signal.SIGKILL, one(job.having(AGENT)))),
    "an exception": (3, broken("raise")),
    "sys.exit(3)": (2, broken("exit")),
    "a segmentation fault": (2, broken("segv")),
    "an endless loop": (1, lambda job: job.np > 1 and broken("loop")(job)),  # of a rank alone nobody can know
    "a rank, SIGSTOP": (1, lambda job: send(signal.SIGSTOP, one(job.ranks()))),
    "SIGKILL, and the newest checkpoint damaged": (2, damaged),
    "the launcher, SIGKILL": (2, launcher(signal.SIGKILL)),
    "the launcher, SIGTERM": (2, launcher(signal.SIGTERM)),
    "the launcher, SIGINT": (1, launcher(signal.SIGINT)),
}


def through(job: Job) -> bool:
    """Whether the job has come to its end; one that has ended otherwise is started again, as a scheduler would."""
    code = job.process.poll()
    if code is None or code == 0:
        return code == 0
    print(f"the launcher has ended with {code}", flush=True)
    ENDED[code] += 1
    job.start()
    return False


ENDED: Counter[int] = Counter()


def main() -> None:
    epochs = max(2, FAULTS)
    job, done, began = Job(epochs), Counter[str](), time.monotonic()
    names = list(KINDS)
    weights = [often for often, _ in KINDS.values()]
    mark, wanted, since = 0, DRAW.randint(1, 20), time.monotonic()
    try:
        while not through(job):
            count = job.updates()
            if count - mark >= wanted and done.total() < FAULTS:
                kind = DRAW.choices(names, weights)[0]
                mark, wanted, since = count, DRAW.randint(1, 20), time.monotonic()
                done[kind] += KINDS[kind][1](job)
                print(f"{time.monotonic() - began:.0f} s, {count} updates: {kind}", flush=True)
            elif count > mark and done.total() >= FAULTS:
                mark, since = count, time.monotonic()
            assert time.monotonic() - since < PATIENCE_S, f"no update for {PATIENCE_S} s"
            time.sleep(0.05)  # how finely the instants of the faults are drawn
        job.ended(10)
    finally:
        send(signal.SIGKILL, job.living())
    report(job, done, time.monotonic() - began)


def report(job: Job, done: Counter[str], seconds: float) -> None:
    lines = [json.loads(line) for line in (FOLDER / "updates").read_text().splitlines()]
    taken = dict(lines)  # the last time that each was done
    assert list(taken) == list(range(1, job.epochs * PER_EPOCH + 1)), "updates are missing"
    for epoch in range(job.epochs):
        ids = [number for step in range(PER_EPOCH) for number in taken[epoch * PER_EPOCH + step + 1]]
        assert sorted(ids) == list(range(SAMPLES)), f"epoch {epoch}: not each sample once"
    model, optimizer = build()
    x, y, _ = samples()
    for _, ids in sorted(taken.items()):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        optimizer.step()
    final = torch.load(FOLDER / "final.pt", weights_only=True)
    gap = max((final[name] - value).abs().max().item() for name, value in model.state_dict().items())
    other, _ = build()
    other.load_state_dict(final)
    right = [(its(x).argmax(1) == y).sum().item() for its in (model, other)]
    found = {
        "faults": done.total(), "kinds": dict(done), "launcher_starts": job.starts, "ended_with": dict(ENDED),
        "updates": len(taken), "updates_done": len(lines), "gap": gap, "right": right, "seconds": round(seconds, 1),
    }  # fmt: skip
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
