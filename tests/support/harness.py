"""Start real ranks, time-limited: whatever happens inside, the whole tree is gone when `run_ranks` returns.

Every process of a run carries an environment variable with the run's own token. So processes that left the
session, or lost their parent (horovodrun's workers do both), are still found, shown and killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
import starter
from starter_process import TOKEN, Asked

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = REPOSITORY / "tests" / "programs"
SUPPORT = Path(__file__).resolve().parent
T = TypeVar("T")
LAUNCHER_VARIABLES = re.compile(
    r"^(HOROVOD_|OMPI_|PMIX_|PMI_|MPI_|SLURM_|PAI_|K_MPI_|TORCHELASTIC_|RANK$|WORLD_SIZE$|LOCAL_|GROUP_|MASTER_)"
)
THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONFAULTHANDLER": "1",
}
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # containers forbid copies between processes: without this Open MPI warns for every rank
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
# how PyTorch's engines get their ranks, where the launcher does not matter
FORKED = {"solo": "forked", "horovod": "forked horovodrun", "ddp": "forked torchrun", "deepspeed": "forked torchrun"}
# horovodrun and `mpirun --tag-output` write "[1,0]<stdout>:text"; horovodrun without tags "[0]<stdout>:text"
_TAG = re.compile(r"\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:")


@dataclass(frozen=True)
class Result:
    """What a run left behind: exit code, output, and output by rank (`ranks_output` stdout, `ranks_error`
    stderr)."""

    returncode: int
    out: str
    err: str
    seconds: float
    ranks_output: dict[int, str] = field(default_factory=dict)
    ranks_error: dict[int, str] = field(default_factory=dict)

    def check(self) -> Result:
        """Return self when the run ended well; fail the test with the whole output otherwise."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.text}"
        return self

    @property
    def text(self) -> str:
        """Everything printed, for messages and searches."""
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}"


def chosen_cases(request: Any) -> list[str]:
    """The values of ``case`` of the module's selected tests, for programs that run those alone; [] where a test among
    them has none, and all must run."""
    here = [item for item in request.session.items if item.module is request.module]
    cases: list[Any] = [getattr(item, "callspec", None) and item.callspec.params.get("case") for item in here]
    return sorted(set(cases)) if all(cases) else []


def children() -> list[psutil.Process]:
    """Returns the processes that this test's process has started, but for those that other rows' ranks fork from."""
    return [child for child in psutil.Process().children() if child.pid not in starter.processes()]


def told_once(result: Result, program: str, *parts: str) -> None:
    """Assert that rank 0 of `program` told rule, what came and the fix, and that nobody shows a traceback of ours."""
    said = result.ranks_error.get(0, "")
    for part in (f"{program}: rank 0: ", "fix: ", *parts):
        assert part in said, result.text
    everyone = "\n".join(result.ranks_error.values())
    assert "Traceback" not in everyone, result.text
    assert everyone.count("fix: ") == 1, result.text


class HarnessError(AssertionError):
    """The run went over its time, or left processes behind."""


class MpirunHangs(HarnessError):
    """Every rank has ended, mpirun has not."""


def run_ranks(
    what: str | Sequence[str | Path],
    np: int,
    *,
    launcher: str = "forked",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 90,
    cwd: str | Path | None = None,
    python: str | Path | None = None,
    grace_s: float = 10,
) -> Result:
    """Run a Python program on `np` ranks and return what it printed.

    Where every rank has ended and mpirun alone has not, it is said as a warning and run once more: PMIx 4.2.2 may wait
    for ever in PMIx_server_finalize at the end of a job that failed (docs/how-hung.md, "What it does not see").

    Args:
        what: a module name, or the interpreter's arguments (["script.py", "--flag"] or ["-m", "module",
            "--flag"]).
        np: how many ranks.
        launcher: for tests that do not care how ranks start: "forked horovodrun", "forked torchrun", or "forked", which
            is horovodrun's world for several ranks and one process without a launcher for one. `starter` forks
            what it can. These start cold: "horovodrun", "horovodrun --mpi", "horovodrun --min-np" (an elastic job),
            "mpirun", "torchrun",
            "torchrun --max-restarts=1", and "none" (one process, np must be 1).
        env: added to a clean environment (this process's, less every launcher's variables, threads pinned to
            one).
        timeout_s: then every rank's stack is printed, the whole tree killed, and the test failed.
        cwd: where to run; the repository by default.
        python: the interpreter; this one by default.
        grace_s: how long processes may outlive the launcher before the test is failed for leaving them
            behind.

    Raises:
        HarnessError: out of time, or processes left behind.
    """
    interpreter = str(python or sys.executable)
    arguments = ["-m", what] if isinstance(what, str) else [str(part) for part in what]
    limits = timeout_s, grace_s
    try:
        return _run_once(launcher, np, interpreter, arguments, env, cwd, *limits)
    except MpirunHangs as error:
        warnings.warn(f"run once more, mpirun does not end though its ranks have: {error}", stacklevel=2)
    return _run_once(launcher, np, interpreter, arguments, env, cwd, *limits)


def _run_once(
    launcher: str,
    np: int,
    interpreter: str,
    arguments: list[str],
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    timeout_s: float,
    grace_s: float,
) -> Result:
    token = uuid.uuid4().hex
    environment = clean_environment({**(env or {}), TOKEN: token})
    failure = HarnessError
    may_fork, launcher = launcher.startswith("forked") and interpreter == sys.executable, _real(launcher, np)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryDirectory() as logs:
        command = [*_launch(launcher, np, interpreter, logs), *arguments]
        # files, not pipes: a process left behind that holds a pipe open would hang us
        start = time.monotonic()
        asked = Asked(launcher, np, arguments, environment, str(cwd or REPOSITORY), logs)
        forked = may_fork and starter.start(asked, env or {})
        process = forked or subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd or REPOSITORY, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
            seconds = time.monotonic() - start
            left = outlive(token, grace_s)
            stacks = _stacks(left) if left else ""
        except subprocess.TimeoutExpired:
            alive = processes_of(token)
            failure = MpirunHangs if _only_mpirun(alive) else HarnessError
            stacks, seconds, left = _stacks(alive), -1.0, []
        finally:
            returncode = _killed(process, token)
        if forked:
            tagged = "none" if launcher == "none" else "horovodrun"
            result = _result(tagged, returncode, *_forked_output(tagged, Path(logs)), seconds, logs)
        else:
            result = _result(launcher, returncode, _read(out), _read(err), seconds, logs)
    shown = f"{' '.join(command)}\n{stacks}\n{result.text}"
    if seconds < 0:
        raise failure(f"not done after {timeout_s} s (killed): {shown}")
    if left:
        raise HarnessError(f"{len(left)} process(es) left behind {grace_s} s after the launcher's end: {shown}")
    return result


def _killed(process: subprocess.Popen[bytes] | starter.Run, token: str) -> int:
    """Kills all processes of a run, also those that a starter forks after its imports; returns the exit code."""
    while True:
        kill_all(token)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without any launcher's variables, threads pinned, the repository
    importable."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(SUPPORT), kept.get("PYTHONPATH", "")]))
    return {**kept, **THREADS, **QUIET, **MPI, "PYTHONPATH": path, **(extra or {})}


@contextmanager
def quick_folder() -> Iterator[Path]:
    """Give a temporary folder, in memory where there is room: for tests that force hundreds of files to disk."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if os.access(shared_memory, os.W_OK) else None) as folder:
        yield Path(folder)


def tool(name: str, python: str | Path | None = None) -> str:
    """Return the path of a command, the one beside the interpreter first."""
    beside = Path(python or sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise HarnessError(f"{name} not found, neither beside {python or sys.executable} nor on PATH")
    return found


def together(*runs: Callable[[], T]) -> list[T]:
    """Does several things at the same time, each `run_ranks` or the like; returns their results.

    For runs that are right or wrong, however slow: one process leaves a core to others. The first failure is raised
    when all have ended.
    """
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run) for run in runs]
    return [future.result() for future in futures]


def _real(launcher: str, np: int) -> str:
    """Returns the launcher that a forked run imitates."""
    if launcher == "forked":
        return "horovodrun" if np > 1 else "none"
    return launcher.removeprefix("forked ")


def _launch(launcher: str, np: int, interpreter: str, logs: str) -> list[str]:
    """Return the command up to the interpreter's arguments."""
    if launcher == "none":
        assert np == 1, "one process without a launcher"
        return [interpreter]
    if launcher.startswith("torchrun"):  # what goes through its log files is tagged by rank
        logged = ["--redirects", "3", "--tee", "3", "--log-dir", logs]
        options = ["--standalone", "--nproc-per-node", str(np), *launcher.split()[1:], *logged]
        return [interpreter, "-m", "torch.distributed.run", *options, "--no-python", interpreter]
    if launcher in ("horovodrun", "horovodrun --mpi", "horovodrun --min-np"):
        # --gloo: a Horovod built with both would start mpirun
        carrier = ["--mpi"] if launcher.endswith("--mpi") else ["--gloo"]
        hosts, elastic = f"localhost:{np}", []
        if launcher.endswith("--min-np"):  # which takes two hosts at least
            hosts, elastic = f"localhost:{np - 1},127.0.0.1:1", ["--min-np", str(np)]
        options = [*carrier, *elastic, "-np", str(np), "-H", hosts]
        return [tool("horovodrun", interpreter), *options, interpreter]
    if launcher == "mpirun":
        return [
            tool("mpirun", interpreter),
            "-np",
            str(np),
            "--oversubscribe",
            "--bind-to",
            "none",
            "--tag-output",
            interpreter,
        ]
    raise ValueError(f"no launcher {launcher!r} in the harness")


def processes_of(token: str) -> list[psutil.Process]:
    """Return the living processes of a run, zombies left out."""
    return [process for process in psutil.process_iter() if _belongs(process, token)]


def _belongs(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
        return False  # gone meanwhile, or another user's: not ours


def _only_mpirun(processes: Sequence[psutil.Process]) -> bool:
    names = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.add(process.name())
    return "mpirun" in names and names <= {"mpirun", "horovodrun"}


def outlive(token: str, grace_s: float) -> list[psutil.Process]:
    """Return the processes still there after the grace; returns at once when there are none."""
    deadline = time.monotonic() + grace_s
    while left := processes_of(token):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return left
        psutil.wait_procs(left, timeout=remaining)
    return []


def kill_all(token: str, grace_s: float = 3) -> None:
    """End every process of a run: TERM, then KILL; new children of dying parents included."""
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s), (signal.SIGKILL, grace_s)):
        alive = processes_of(token)
        if not alive:
            return
        for process in alive:
            _signal(process, sign)
        psutil.wait_procs(alive, timeout=wait_s)


def _signal(process: psutil.Process, sign: signal.Signals) -> None:
    try:
        process.send_signal(sign)
    except psutil.NoSuchProcess:
        return  # ended by itself


def _stacks(processes: Sequence[psutil.Process]) -> str:
    """Return every process's Python stack: py-spy, which does not disturb it, or else faulthandler by
    SIGABRT."""
    return "\n".join(_stack_texts(processes))


def _stack_texts(processes: Sequence[psutil.Process]) -> Iterator[str]:
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    for process in processes:
        try:
            command = " ".join(process.cmdline())[:200]
        except psutil.NoSuchProcess:
            continue
        shown = ""
        if spy and "python" in command:
            dump = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            shown = dump.stdout if dump.returncode == 0 else ""
        if not shown and "python" in command and "horovodrun" not in command:
            _signal(process, signal.SIGABRT)  # PYTHONFAULTHANDLER writes the stacks into its standard error
            psutil.wait_procs([process], timeout=3)
            shown = "(see its standard error)"
        yield f"--- process {process.pid}: {command}\n{shown}"


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _forked_output(launcher: str, logs: Path) -> tuple[str, str]:
    """Returns what a forked run wrote to both streams, as horovodrun would have passed it on."""
    streams = []
    for stream in ("stdout", "stderr"):
        files = sorted(logs.glob(f"*.{stream}"), key=lambda file: int(file.stem))
        texts = {file.stem: file.read_text(errors="replace").splitlines(keepends=True) for file in files}
        tags = {rank: "" if launcher == "none" else f"[{rank}]<{stream}>:" for rank in texts}
        streams.append("".join(tags[rank] + line for rank, lines in texts.items() for line in lines))
    return streams[0] + "".join(file.read_text() for file in logs.glob("launcher")), streams[1]


def _result(launcher: str, returncode: int, out: str, err: str, seconds: float, logs: str) -> Result:
    if launcher == "none":
        return Result(returncode, out, err, seconds, {0: out}, {0: err})
    if launcher.startswith("torchrun"):
        ranks_output, ranks_error = (_torchrun_ranks(logs, stream) for stream in ("stdout", "stderr"))
        return Result(returncode, out, err, seconds, ranks_output, ranks_error)
    ranks: dict[str, dict[int, list[str]]] = {"stdout": {}, "stderr": {}}
    for line in [*out.splitlines(keepends=True), *err.splitlines(keepends=True)]:
        # [the launcher's own words, rank, stream, text, rank, stream, text ...]: mpirun tags every write, which may be
        # in the middle of a line; a line without any tag is the launcher's
        pieces = _TAG.split(line)
        for rank, stream, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            ranks[stream].setdefault(int(rank), []).append(text)
    return Result(returncode, out, err, seconds, _joined(ranks["stdout"]), _joined(ranks["stderr"]))


def _torchrun_ranks(logs: str, stream: str) -> dict[int, str]:
    """From its files of each rank: what it repeats of them on its own output may end one line within another."""
    files = Path(logs).glob(f"*/attempt_*/*/{stream}.log")
    return {int(file.parent.name): file.read_text(errors="replace").strip("\n") for file in sorted(files)}


def _joined(texts: dict[int, list[str]]) -> dict[int, str]:
    return {rank: "".join(its).strip("\n") for rank, its in sorted(texts.items())}
