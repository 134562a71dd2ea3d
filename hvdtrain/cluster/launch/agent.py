"""Runs on each host of a job, started by the launcher through ssh: starts the host's ranks, watches them, ends them.

As a program it is two processes. The one that ssh started is the guard: it only waits for the
other, the agent proper, and then kills the remaining processes of the job. Both adopt orphans, so they still find a
process that left its parent or its session. So the ranks and all that they started end, whichever of launcher,
connection, agent and guard dies first.

The agent is one loop over file descriptors that never blocks: a terminal that takes no output delays the ranks' output
but not the heartbeats.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.cluster.hosts import probe
from hvdtrain.cluster.hosts.data_path import DataPath
from hvdtrain.cluster.hosts.protocol import BEAT_S, WINDOW, Message, mark_of
from hvdtrain.cluster.launch import processes
from hvdtrain.cluster.launch.environment import is_of_a_host
from hvdtrain.cluster.launch.processes import TICK_S, guard, sweep
from hvdtrain.cluster.launch.rank import PASSED_ON, Rank, StartError, ask, rendezvous_process
from hvdtrain.comm.link import Decoder, Outbox, encode
from hvdtrain.comm.ring import forget_launch
from hvdtrain.core import variables
from hvdtrain.core.version import __version__
from hvdtrain.watch.preemption import ASKS, ENDS
from hvdtrain.world.resources import cgroup_quota

MOST_BUFFERED_BYTES = 1 << 20  # of output that the connection has not taken yet; then the ranks wait


class Agent:
    """The agent's loop; `run` returns when no process of the job remains."""

    def __init__(self, inward: int, outward: int, mark: bytes) -> None:
        self._inward, self._outward, self._mark = inward, outward, mark
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder(mark)
        self._out = Outbox(outward)
        self._ranks: dict[int, Rank] = {}  # by process id
        self._rendezvous: subprocess.Popen[bytes] | None = None
        self._rendezvous_due = 0  # answers of it
        self._given: int | None = None  # a file in memory: what every rank reads
        self._says = os.memfd_create("ending")  # that no update will come, to ranks that save at the next one
        self._answers = os.memfd_create("answers")  # what the first workers recorded, for those that join later
        self._settings: dict[str, float] = {"lost_s": 15.0, "stopped_s": 15.0, "grace_s": 5.0}
        self._untaken = 0  # messages of output that the launcher has not shown yet
        self._data_path: DataPath | None = None
        self._not_ours: set[int] = set()  # processes that may not be ended
        self._heard_s = self._beaten_s = time.monotonic()
        self._stages: list[tuple[float, int]] = []  # (when, signal) still to come of the end
        self._kill_s = float("inf")
        self._asked: set[int] = set()  # processes that ranks left behind, and that were asked to end
        self._signalled: int | None = None
        self._launch = ""  # what marks the ranks
        self._ending = self._ended = self._well = False

    def run(self) -> int:
        """Serves the launcher until it, or the connection to it, ends the job; returns the exit code."""

        def note(number: int, frame: object) -> None:
            self._signalled = number  # acted on in the loop: a handler may run in the middle of anything

        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, note)  # not SIG_IGN, which the ranks would inherit
        for number in PASSED_ON:  # as some schedulers send them to every process of a job
            signal.signal(number, lambda *_: None)
        for descriptor in (self._inward, self._outward):
            os.set_blocking(descriptor, False)
        self._selector.register(self._inward, selectors.EVENT_READ, self._receive)
        self._send("hello", **hello())
        while not self._ended:
            for key, _ in self._selector.select(TICK_S):
                key.data()
            self._tick()
        while self._out and self._is_heard():
            for key, _ in self._selector.select(TICK_S):
                key.data()
        processes.send([os.getppid()], signal.SIGCONT)  # a guard that is stopped could not see the end
        return 0

    def _is_heard(self) -> bool:
        """Returns True if the launcher is alive."""
        connected = self._inward in self._selector.get_map()
        return connected and time.monotonic() - self._heard_s <= self._settings["lost_s"]

    # ---- the launcher

    def _send(self, kind: str, **fields: Any) -> None:
        self._out.write(encode({"type": kind, **fields}, self._mark))
        self._flush()

    def _flush(self) -> None:
        """Writes what the launcher takes now; the rest when it takes more."""
        self._out.flush()  # of a launcher that is gone the end of file, on the other descriptor, ends the job
        writing = self._outward in self._selector.get_map()
        if self._out and not writing:
            self._selector.register(self._outward, selectors.EVENT_WRITE, self._flush)
        elif writing and not self._out:
            self._selector.unregister(self._outward)
        self._listen_to_ranks()

    def _receive(self) -> None:
        try:
            data = os.read(self._inward, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._inward)  # which `_is_heard` sees
            return
        self._heard_s = time.monotonic()
        for message in self._decoder.feed(data):
            self._handle(message)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "settings":
            self._settings = {name: float(message[name]) for name in self._settings}
        elif kind == "rendezvous":
            self._serve(message)
        elif kind == "input":
            if self._given is None:
                self._given = os.memfd_create("input")
            os.write(self._given, base64.b64decode(message["data"]))
        elif kind == "start" and not self._ending:
            self._start(message)
        elif kind == "taken":
            self._untaken -= int(message["count"])
            self._listen_to_ranks()
        elif kind == "signal":
            self._signal(int(message["number"]), message.get("rank"))
        elif kind == "tell":
            for rank in self._ranks.values():
                if rank.rank == message["rank"] and rank.code is None:
                    rank.say(message["say"])
        elif kind == "answers":
            os.write(self._answers, base64.b64decode(message["data"]))
        elif kind == "peer":
            self._watch_the_data_path(message)
        elif kind == "end":
            self._end(int(message["signal"]), float(message["grace_s"]), asks=bool(message.get("asks")))
            self._well = bool(message.get("well"))

    def _living(self) -> list[int]:
        """The processes of this host's ranks."""
        return [its.pid for its in self._ranks.values() if its.code is None]

    def _signal(self, number: int, rank: int | None) -> None:
        if number == signal.SIGUSR1 and not self._ending:
            os.pwrite(self._says, ASKS, 0)
        for its in self._ranks.values():
            if rank in (None, its.rank):
                its.signal(number)

    def _serve(self, message: Message) -> None:
        if self._rendezvous is None:
            self._rendezvous = rendezvous_process()
            assert self._rendezvous.stdout is not None
            self._selector.register(self._rendezvous.stdout, selectors.EVENT_READ, self._rendezvous_answers)
        self._rendezvous_due += message["places"] is not None
        ask(self._rendezvous, address=message["address"], places=message["places"], serial=message.get("serial", 0))

    def _rendezvous_answers(self) -> None:
        assert self._rendezvous is not None and self._rendezvous.stdout is not None
        answer = next(iter(Decoder().feed(self._rendezvous.stdout.readline())), None)
        due, self._rendezvous_due = self._rendezvous_due > 0, self._rendezvous_due - 1
        if answer is None:
            self._selector.unregister(self._rendezvous.stdout)
            self._rendezvous, self._rendezvous_due = None, 0  # the next one is served by another process
        if answer is not None and "port" in answer:
            self._send("rendezvous", port=answer["port"], serial=answer["serial"])
        elif due and not self._ending:
            why = (answer or {}).get("error", "the rendezvous server ended before it listened")
            self._send("failed", rank=None, what=why)

    # ---- the ranks

    def _start(self, message: Message) -> None:
        own = {name: value for name, value in os.environ.items() if name not in set(message["without"])}
        environment = {**message["defaults"], **own, **message["env"], variables.LAUNCH: message["token"]}
        self._launch = message["token"]
        environment[variables.ENDING] = f"/proc/{os.getpid()}/fd/{self._says}"
        self._watch_the_data_path(message)
        for wanted in message["ranks"]:
            try:
                env = {**environment, **wanted["env"]}
                if env.get(variables.ELASTIC) == "new":
                    env[variables.ELASTIC_ANSWERS] = f"/proc/{os.getpid()}/fd/{self._answers}"
                rank = Rank(wanted["rank"], message["argv"], message["cwd"], env, self._given)
            except StartError as error:
                self._send("failed", rank=wanted["rank"], what=str(error))
                continue
            self._ranks[rank.pid] = rank
        if self._given is not None:
            os.close(self._given)
        self._listen_to_ranks()

    def _watch_the_data_path(self, message: Message) -> None:
        if self._data_path is not None:
            self._data_path.close()
        own, peer = message["own"], message["peer"]
        self._data_path = DataPath(own, peer) if peer is not None else None

    def _listen_to_ranks(self) -> None:
        """Reads what ranks write, unless there is too much on its way: then they wait, but nothing else does."""
        room = len(self._out) < MOST_BUFFERED_BYTES
        for rank in self._ranks.values():
            for descriptor in rank.open_pipes():
                # its line does not wait for a reader of output
                wanted = room and (self._untaken < WINDOW or descriptor == rank.line)
                listening = descriptor in self._selector.get_map()
                if wanted and not listening:
                    self._selector.register(descriptor, selectors.EVENT_READ, self._reader(rank, descriptor))
                elif listening and not wanted:
                    self._selector.unregister(descriptor)

    def _reader(self, rank: Rank, descriptor: int) -> Callable[[], None]:
        def read() -> None:
            if descriptor not in self._selector.get_map():
                return  # held back by what another descriptor of this round had to say
            stream, lines = rank.read(descriptor, time.monotonic())
            if descriptor not in rank.open_pipes():
                self._selector.unregister(descriptor)
            self._relay(rank, stream, lines)

        return read

    def _relay(self, rank: Rank, stream: str, lines: list[Any]) -> None:
        if stream == "line":
            for said in lines:
                self._send("worker", rank=rank.rank, said=said)
        elif lines:
            self._untaken += 1
            self._send("out", rank=rank.rank, stream=stream, lines=lines)

    def _tick(self) -> None:
        now = time.monotonic()
        self._reap(now)
        for rank in self._ranks.values():
            rank.flush()
            rank.deliver()
            if rank.is_over(now):
                self._send_exit(rank, now)
            elif rank.code is None and (for_s := rank.stopped_s(now)) >= self._settings["stopped_s"]:
                if not rank.stop_reported:
                    self._send("stopped", rank=rank.rank, for_s=for_s)
                rank.stop_reported = True
        if self._data_path is not None and not self._ending:
            self._look_at_the_data_path(self._data_path, now)
        if now - self._beaten_s >= BEAT_S:
            self._beaten_s = now
            if not self._out:  # else what waits there is a sign of life as well
                self._send("beat")
            if processes.is_stopped(os.getppid()):  # as the guard does for the agent
                processes.send([os.getppid()], signal.SIGCONT)
        if self._signalled is not None and not self._ending:
            self._send("leaving", why=f"its agent was ended by {signal.Signals(self._signalled).name}")
            self._end(signal.SIGTERM, self._settings["grace_s"])
        if not self._is_heard():
            self._end(signal.SIGTERM, self._settings["grace_s"])
        if self._ending:
            self._go_on_ending(now)

    def _look_at_the_data_path(self, path: DataPath, now: float) -> None:
        if (for_s := path.unreached_s(now)) > self._settings["lost_s"]:
            self._send("cut", for_s=for_s, peer=path.peer)
            path.close()
            self._data_path = None

    def _reap(self, now: float) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks and self._ranks[pid].code is None:  # else another process with its number
                self._ranks[pid].ended(os.waitstatus_to_exitcode(status), now)

    def _send_exit(self, rank: Rank, now: float) -> None:
        for descriptor in rank.open_pipes():  # kept open by something the rank started and left
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        for stream, lines in rank.close():
            self._relay(rank, stream, lines)
        self._send("exit", rank=rank.rank, code=rank.code, ago_s=round(now - rank.ended_s, 3))

    # ---- the end

    def _end(self, number: int, grace_s: float, *, asks: bool = False) -> None:
        """Begins to end everything: sends the ranks the signal, then kills the remaining processes. A second call can
        only shorten the grace period. `asks`: no error occurred, and the ranks may use the grace period to save."""
        now = time.monotonic()
        if not asks:
            os.pwrite(self._says, ENDS, 0)
        stages = [(now, number), (now + grace_s, signal.SIGKILL)]
        if number == signal.SIGINT:  # a handler of it may take its time, or not be there
            stages = [(now, number), (now + grace_s, signal.SIGTERM), (now + 2 * grace_s, signal.SIGKILL)]
        if not self._ending or stages[-1][0] < self._kill_s:
            self._stages, self._kill_s = stages, stages[-1][0]
        self._ending = True

    def _go_on_ending(self, now: float) -> None:
        left = [pid for pid in processes.descendants(os.getpid()) if pid not in self._not_ours]
        job = [pid for pid in left if self._rendezvous is None or pid != self._rendezvous.pid]
        if not job and self._rendezvous is not None and self._rendezvous.stdin is not None:
            self._rendezvous.stdin.close()  # as long as it is open, the rendezvous is served
        if not left:
            self._all_ended(now)
            return
        mains = self._living()
        while self._stages and now >= self._stages[0][0]:
            number = self._stages.pop(0)[1]
            self._leave(processes.send(mains if number != signal.SIGKILL else left, number))
        if not self._stages:
            self._leave(processes.send(left, signal.SIGKILL))  # again and again: one may just have started another
        elif not mains:  # what the ranks left behind
            self._leave(processes.send(set(job) - self._asked, signal.SIGTERM))
            self._asked |= set(job)

    def _leave(self, not_ours: set[int]) -> None:
        """Reports the processes that remain because they belong to another user."""
        for pid in not_ours:
            self._send("left", what=f"process {pid} of another user: {processes.command_of(pid)}")
        self._not_ours |= not_ours

    def _all_ended(self, now: float) -> None:
        self._reap(now)
        if self._living():
            return  # a thread of it still ends: a zombie that cannot be waited for yet
        for rank in self._ranks.values():
            if not rank.reported:
                self._send_exit(rank, now)
        if self._well:  # nobody asks what became of workers that were lost
            forget_launch(self._launch)
        self._send("ended")
        self._ended = True


def hello() -> dict[str, Any]:
    """Returns the facts of this host that the launcher needs."""
    return {
        "python": platform.python_version(),
        "version": __version__,
        "host": socket.gethostname(),
        "interfaces": probe.interfaces(),  # with an IPv4 address
        "interface_names": [name for _, name in socket.if_nameindex()],
        "reached": probe.reached(),
        "cores": min(float(len(os.sched_getaffinity(0))), cgroup_quota()),
        "own": {
            name: hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:12]
            for name, value in os.environ.items()
            if not is_of_a_host(name)
        },
    }


def main() -> int:
    """Becomes guard and agent of a connection with a token, or with "--sweep TOKEN GRACE_S" cleans up; returns the exit
    code in each."""
    if sys.argv[1:2] == ["--sweep"]:
        sweep(sys.argv[2], float(sys.argv[3]))
        return 0
    # ignored, which the launcher may have from its parent, it would hide how ranks end
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes.adopt_orphans()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return guard(pid)
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    processes.adopt_orphans()
    return Agent(sys.stdin.fileno(), sys.stdout.fileno(), mark_of(sys.argv[1])).run()


if __name__ == "__main__":
    sys.exit(main())
