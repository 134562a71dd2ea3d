"""The process that has imported frameworks. For each run it forks a launcher, which forks the ranks.

A rank gets what a cold start would give it: a session, environment variables, a working directory, `sys.argv`,
`sys.path` and `__main__`; it imports Horovod and hvdtrain itself. The launcher makes the world of `horovodrun --gloo`,
with Horovod's own functions, or that of torchrun, and ends all ranks after the first failure.

Ranks of one run share the seed of Python's hashes, and what frameworks do while they are imported. Tests of such
things, of launchers, signals and processes, name a real launcher.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

TOKEN = "HVDTRAIN_TEST_RUN"
NO_RUN = "0" * 32  # as long as a run's token, which takes its place
_GRACE_S = 5.0  # from SIGTERM to SIGKILL, as horovodrun has it
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Asked:
    """A run.

    Args:
        launcher: whose variables the ranks get: "horovodrun", "torchrun", or "none" for one process without any.
        np: how many ranks.
        arguments: the interpreter's.
        environ: all other variables.
        cwd: where the program runs.
        logs: a folder; rank N writes to N.stdout and N.stderr there.
    """

    launcher: str
    np: int
    arguments: Sequence[str]
    environ: Mapping[str, str]
    cwd: str
    logs: str


def serve(line: int, frameworks: Sequence[str]) -> CodeType:
    """Imports frameworks, then forks runs until the other end of `line` is closed. Returns in ranks only.

    Returns:
        The rank's program, to be executed in `__main__`.
    """
    for name in (*frameworks, "horovod.runner.gloo_run"):  # the last: for launchers
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each rank's collector would write to all pages with objects
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"cannot be forked: the import of {frameworks} started {threads - 1} thread(s)")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    token_at, control = _address_of_token(), socket.socket(fileno=line)
    a_child_ended, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    runs: dict[int, socket.socket] = {}
    while True:
        ready = select.select([control, a_child_ended], [], [])[0]
        if a_child_ended in ready:
            a_child_ended.recv(4096)
            _reap(runs)
        if control in ready:
            message, lines, *_ = socket.recv_fds(control, 1 << 20, 1)
            if not message:  # the tests have ended, or were killed
                _end_everything()
            report = socket.socket(fileno=lines[0])
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (control, a_child_ended, wakes, report, *runs.values()):
                    one.close()
                asked = Asked(**json.loads(message))
                os.setsid()
                ctypes.memmove(token_at, asked.environ[TOKEN].encode(), len(NO_RUN))
                return _become(asked, 0, {}) if asked.launcher == "none" else _launch(asked)
            runs[pid] = report


def _address_of_token() -> int:
    """Returns where /proc/PID/environ has the token: in this process's memory, which may be written to."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()  # the third and on, proc(5)
    variable = f"{TOKEN}={NO_RUN}"
    env_start, before = int(fields[50 - 3]), Path("/proc/self/environ").read_bytes().index(variable.encode())
    return env_start + before + len(variable) - len(NO_RUN)


def _reap(runs: dict[int, socket.socket]) -> None:
    """Collects ended processes: launchers, whose exit codes are reported, and orphans of runs."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in runs:
            with runs.pop(pid) as report:
                report.send(str(os.waitstatus_to_exitcode(status)).encode())


def _end_everything() -> None:
    import psutil

    while children := psutil.Process().children(recursive=True):
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children)
    os._exit(0)


# ---- in a launcher


def _launch(asked: Asked) -> CodeType:
    """Forks the ranks, and waits for them. Returns in ranks only."""
    variables, listener, serve_world = _WORLDS[asked.launcher](asked.np)
    ranks = {}
    for rank, its_variables in enumerate(variables):
        pid = os.fork()
        if not pid:
            listener.close()
            os.setsid()
            return _become(asked, rank, its_variables)
        ranks[pid] = rank
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    server = serve_world()  # this starts threads: no fork after it
    failure = _wait_for(ranks)
    Path(asked.logs, "launcher").write_text(failure, encoding="utf-8")
    del server
    os._exit(1 if failure else 0)


def _wait_for(ranks: dict[int, int]) -> str:
    """Waits until all ranks have ended; ends them after the first failure, which it returns in words."""
    failure, killed_at = "", None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not failure:
                failure, killed_at = f"Process {rank} exit with status code {code}.\n", time.monotonic() + _GRACE_S
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        elif killed_at is None:
            signal.sigwait({signal.SIGCHLD})
        elif not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, killed_at - time.monotonic())):
            killed_at = None
            for other in ranks:
                os.killpg(other, signal.SIGKILL)
    return failure


_World = tuple[list[dict[str, str]], socket.socket, Callable[[], Any]]


def _as_horovodrun(np: int) -> _World:
    """Returns each rank's variables, the rendezvous' socket, and what serves it."""
    from horovod.runner import gloo_run
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    slots = get_host_assignments(parse_hosts(f"localhost:{np}"), np)
    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, False)
    server.daemon_threads = True
    server.init(slots)
    job = gloo_run.create_run_env_vars("127.0.0.1", ["lo"], str(server.server_port))
    variables = [{**job, **gloo_run.create_slot_env_vars(slot), "PYTHONUNBUFFERED": "1"} for slot in slots]
    return variables, server.socket, threading.Thread(target=server.serve_forever, daemon=True).start


def _as_torchrun(np: int) -> _World:
    """Returns each rank's variables, the socket of the agent's store, and what serves it."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port, size = listener.getsockname()[1], str(np)
    job = {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    variables = [job | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) for rank in range(np)]

    def serve_store() -> TCPStore:
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )  # fmt: skip

    return variables, listener, serve_store


_WORLDS = {"horovodrun": _as_horovodrun, "torchrun": _as_torchrun}

# ---- in a rank


def _become(asked: Asked, rank: int, variables: dict[str, str]) -> CodeType:
    """Makes this process what a cold start would have made it; returns its program."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{asked.logs}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    environ = {**asked.environ, **variables}
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    if "PYTHONUNBUFFERED" in variables:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    tempfile.tempdir = None  # found again, in TMPDIR
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:  # the launcher's part of it
        del sys.modules[name]
    # a cold start seeds them from the system; Python's own random does so after each fork
    sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    os.chdir(asked.cwd)
    return _program(*asked.arguments)


def _program(first: str, *rest: str) -> CodeType:
    """Sets what `python FIRST REST` would set; returns what it would execute."""
    if first == "-W":
        sys.warnoptions.append(rest[0])
        warnings.simplefilter(rest[0])  # type: ignore[arg-type]
        return _program(*rest[1:])
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        return compile(rest[0], "<string>", "exec", dont_inherit=True)
    if first == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], os.getcwd()
        return compile(f"__import__('runpy')._run_module_as_main({rest[0]!r})", "<string>", "exec")
    path = os.path.abspath(first)
    sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.realpath(first))
    vars(sys.modules["__main__"]).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
