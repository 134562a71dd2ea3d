"""`hvdtrain.run`: calls a function on N ranks, from a program or a notebook."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO, get_args

from hvdtrain.cluster.function.function_rank import BOOT, RAISED, UNFIT
from hvdtrain.cluster.hosts.hosts import Host, asked_for
from hvdtrain.cluster.hosts.ssh import Ssh
from hvdtrain.cluster.launch import environment, launcher
from hvdtrain.cluster.launch.failures import Failure
from hvdtrain.cluster.launch.job import Job, Timeouts
from hvdtrain.cluster.launch.output import FULL
from hvdtrain.core import launchers, variables
from hvdtrain.core.errors import ConfigError, LauncherError, install_command

Output = Literal["all", "main", "none"]
_LAST_LINES = 12
_RULE = "every rank must come to the function's end"


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    output: Output = "all",
    network: str | None = None,
    python: str = sys.executable,
    ssh_port: int | None = None,
    identity: str | None = None,
    timeouts: Timeouts | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on every rank of a new job; returns the list of their results, in rank order.

    The ranks are separate processes, which `run` starts as `hvdtrain launch` does. If one fails, all end. cloudpickle
    transfers the function, its arguments and its results. So the function may be a lambda, or be defined in a cell of a
    notebook or in a script without `if __name__ == "__main__"`. Objects there that it refers to are pickled with it.
    Read large data in the function instead of passing it.

    Example:
        def train(epochs):
            with hvdtrain.init("torch") as world:
                return world.rank
        ranks = hvdtrain.run(train, args=(3,), np=2)

    Args:
        function: the function that every rank calls; it begins with `hvdtrain.init(...)`.
        args, kwargs: its arguments, the same on every rank.
        np: the number of ranks; None: one per slot of `hosts` or `hostfile`.
        hosts: "host1:4,host2:4"; None: the hosts of the current Slurm job, else this machine.
        hostfile: a file with lines like "host1 slots=4", in place of `hosts`.
        env: variables for the ranks, added to those of this process (other hosts get none that look secret).
        output: the ranks whose output is shown here: "all" (each line with its rank), "main" (rank 0) or "none".
        network, python, ssh_port, identity: as the flags of `hvdtrain launch`.
        timeouts: the job's time limits.

    Raises:
        ConfigError: this process is itself a rank, an argument is wrong, or the function cannot be pickled.
        LauncherError: the job could not be started, a rank failed, or a result cannot be read here. The message names
            the rank that failed first, with its last lines. `__cause__` is that rank's error if it can be pickled.
        KeyboardInterrupt: you ended the job; all ranks have ended.
    """
    _need_cloudpickle()
    _refuse_within_a_job()
    _check(function, args, np, hosts, env, output, timeouts)
    job_hosts = asked_for(hosts, Path(hostfile) if hostfile is not None else None, os.environ)
    if job_hosts is None and np is None:
        raise ConfigError("hvdtrain.run needs the number of ranks", "neither np nor hosts", "hvdtrain.run(train, np=2)")
    job_hosts = job_hosts or [Host("localhost", np or 1)]
    call = _pickled(function, tuple(args), dict(kwargs or {}))
    timeouts = timeouts or Timeouts()
    job = Job(
        [python, "-c", BOOT],
        job_hosts,
        np or sum(host.slots for host in job_hosts),
        env=environment.passed(os.environ) | dict(env or {}),
        python=python,
        ssh=Ssh(ssh_port, identity),
        network=network,
        timeouts=timeouts,
        given=f"{json.dumps(_places_of_modules())}\n{timeouts.grace_s}\n".encode() + call,
    )
    answers: dict[int, list[str]] = {rank: [] for rank in range(job.np)}
    show = _display(output)

    def take(rank: int, stream: str, line: str) -> None:
        if stream == "result":
            answers[rank].append(line)
        else:
            show(rank, sys.stdout if stream == "stdout" else sys.stderr, line)

    outcome = launcher.run(job, on_line=take)
    if outcome.interrupted is not None:
        _interrupt(outcome.interrupted)
    if (failed := outcome.failed) is not None:
        lines = answers.get(failed.rank, []) if failed.rank is not None else []
        cause, why_none = _loaded(lines) if lines[-1:] == [RAISED] else (None, "")
        raise _failure(failed, lines, why_none) from cause
    return [_returned(rank, answers.pop(rank)) for rank in range(job.np)]


def _check(function: Any, args: Any, np: Any, hosts: Any, env: Any, output: Any, timeouts: Any) -> None:
    """Raises `ConfigError` with the arguments that `run` does not take."""
    holds = {
        f"function={function!r}: what every rank calls": callable(function),
        f"np={np!r}: a whole number, at least 1": np is None or (type(np) is int and np > 0),
        f"args={args!r}: a list or tuple": isinstance(args, (list, tuple)),
        f'hosts={hosts!r}: "host1:4,host2:4"': hosts is None or isinstance(hosts, str),
        f"output={output!r}: one of {', '.join(get_args(Output))}": output in get_args(Output),
        f"env={env!r}: strings": all(isinstance(text, str) for pair in (env or {}).items() for text in pair),
        f"timeouts={timeouts!r}: an hvdtrain.Timeouts": isinstance(timeouts, (Timeouts, type(None))),
    }
    wrong = [what for what, is_so in holds.items() if not is_so]
    if wrong:
        raise ConfigError("hvdtrain.run was called with what it does not take", "\n".join(wrong))


def _pickled(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    from hvdtrain.cluster.function import function_pickle

    try:
        return function_pickle.dump_call(function, args, kwargs)
    except Exception as error:  # a pickler raises what the objects raise
        rule = "the function of hvdtrain.run, its arguments and what it refers to must be picklable"
        remedy = "open files, locks, generators and connections within the function"
        received = f"{function_pickle.why_not(function, args, kwargs)}{type(error).__name__}: {error}"
        raise ConfigError(rule, received, remedy) from error


def _interrupt(number: int) -> NoReturn:
    """Does to this process what a signal that ended the job does to it."""
    signal.raise_signal(number)  # whose handler is the user's own again
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise LauncherError(_RULE, f"the job was ended by {signal.Signals(number).name}, which did not end its caller")


def _need_cloudpickle() -> None:
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        rule = "hvdtrain.run needs cloudpickle, here and on the hosts"
        raise ConfigError(rule, f"none in {sys.executable}", install_command("build")) from None


def _refuse_within_a_job() -> None:
    here = launchers.detect(os.environ)
    if here.size > 1 or variables.RESULT_FD in os.environ:
        rule = "hvdtrain.run cannot be called on a rank: it starts the ranks itself"
        received = f"this process is rank {here.rank} of {here.size}, started by {here.launcher}"
        raise ConfigError(rule, received, "start the program once: python train.py; or call the function directly")


def _places_of_modules() -> list[str]:
    """`sys.path` without what the interpreter itself puts there, which may be another one's on another host."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = {os.path.realpath(path) for name in names if (path := sysconfig.get_path(name))}
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))

    def is_own(place: str) -> bool:
        real = os.path.realpath(place)
        inside = real.startswith(stdlib + os.sep) and f"{os.sep}site-packages" not in real
        return real in own or inside or bool(place.endswith(".zip") and not os.path.exists(place))

    return [place for place in sys.path if not place or not is_own(place)]


def _display(output: Output) -> Callable[[int, TextIO, str], None]:
    full: list[TextIO] = []

    def show(rank: int, stream: TextIO, line: str) -> None:
        if stream in full or not (output == "all" or (output == "main" and rank == 0)):
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(f"[{rank}] {line}" if output == "all" else line, file=stream, flush=True)
        except OSError as error:
            if error.errno not in FULL:  # whoever read it is gone
                raise
            full.append(stream)  # which costs the output, not the job
            with contextlib.suppress(OSError):
                print(f"hvdtrain.run: no more output: {error.strerror}", file=sys.stderr, flush=True)

    return show


# ---- what came back: pieces in base64, how the function ended


def _loaded(lines: Sequence[str]) -> tuple[Any, str]:
    """Returns the object in the pieces and ""; or None and the reason, if it cannot be read."""
    if len(lines) == 1:
        return None, ""
    try:
        return pickle.loads(b"".join(map(base64.b64decode, lines[:-1]))), ""
    except Exception as error:  # an unpickler raises what the objects raise
        return None, f"cannot be read here: {type(error).__name__}: {error}"


def _returned(rank: int, lines: Sequence[str]) -> Any:
    value, why_none = _loaded(lines)
    if why_none:
        rule = "what the function returns must be readable by its caller"
        remedy = "return numbers, arrays, state_dict() and the like, or put the class into a module that both import"
        raise LauncherError(rule, f"what rank {rank} returned {why_none}", remedy)
    return value


def _failure(failed: Failure, lines: Sequence[str], why_none: str) -> LauncherError:
    why = f"{failed.why}; the function {UNFIT[1:]}" if lines[-1:] == [UNFIT] else failed.why
    last = "\n".join(f"  | {line}" for line in failed.lines[-_LAST_LINES:])
    received = f"{failed.who} failed first, after {failed.after_s:.1f} s: {why}"
    parts = [received, f"what it raised {why_none}" if why_none else "", last]
    return LauncherError(_RULE, "\n".join(filter(None, parts)))
