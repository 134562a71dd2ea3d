"""Every test leaves the process as it found it; quick tests run first.

Frameworks are imported in child processes only: they start threads that never end, change the environment and take
seconds, and a test that needs one is a test of real ranks anyway (`harness.run_ranks`).
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from harness import children
from hypothesis import settings
from keras_cases import ran  # noqa: F401  (a fixture)
from limits import limit  # noqa: F401  (a fixture)

HERE = Path(__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod")
# the machine may be busy, and a test that fails must fail again
settings.register_profile("hvdtrain", deadline=None, derandomize=True, database=None)
settings.load_profile("hvdtrain")
# a shell that starts the tests in its background has them ignore Ctrl-C, and every program that they start as well
signal.signal(signal.SIGINT, signal.default_int_handler)
# what starts a process, as Python tells it (docs.python.org/3/library/audit_events.html)
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
in_unit = False
# pytest's own
IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST", "PYTEST_VERSION"}


def pytest_configure(config: pytest.Config) -> None:
    """Gives all programs that tests start one temporary folder, which goes at the end: who is killed clears up nothing.

    pytest's own folders, kept for who looks into a failure, stay where they are.
    """
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist has its parent's
        return
    tempfile.gettempdir()  # noted here once and for all, before the variable is set
    before, folder = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="hvdtrain-tests-")
    os.environ["TMPDIR"] = folder

    def forget() -> None:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)  # what is just ending may still write there

    config.add_cleanup(forget)


def _tier(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by folder (unit, process, ranks, cluster, docker); then slow ones and those of several ranks come last."""
    for item in items:
        item.add_marker(_tier(item))
        if "limit" in getattr(item, "fixturenames", ()):
            item.add_marker("limits")
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, _tier(item) in ("ranks", "cluster")))


def _refuse_processes(event: str, args: tuple[object, ...]) -> None:
    if in_unit and event in STARTS:
        raise AssertionError(f"a test in tests/unit starts no process: {event} {args[:1]}; it belongs to tests/process")


sys.addaudithook(_refuse_processes)


@pytest.fixture(autouse=True)
def starts_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests/unit no process is started."""
    global in_unit
    in_unit = request.node.get_closest_marker("unit") is not None
    yield
    in_unit = False


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, child processes, environment variables, or an imported framework."""
    threads, environment, folder = set(threading.enumerate()), dict(os.environ), os.getcwd()
    frameworks = _frameworks()
    starts_none = request.node.get_closest_marker("unit") is not None  # see `starts_nothing`
    children = set() if starts_none else _children()
    yield
    leaks = [
        *(f"thread {thread.name}" for thread in _new_threads(threads)),
        *(f"child process {_name(process)}" for process in (set() if starts_none else _children() - children)),
        *(f"environment variable {name}" for name in _changed(environment)),
        *(f"imported {name} into the test process" for name in sorted(_frameworks() - frameworks)),
        *([f"working directory {os.getcwd()}"] if os.getcwd() != folder else []),
    ]
    assert not leaks, "the test left behind: " + "; ".join(leaks)


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that are still alive; one that is just ending gets a second to do so."""
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(timeout=1)
    return [thread for thread in new if thread.is_alive()]


def _children() -> set[psutil.Process]:
    mine = children()
    all_of_them = {*mine, *(below for child in mine for below in child.children(recursive=True))}
    return {process for process in all_of_them if not _is_in_a_host(process.pid)}


def _is_in_a_host(pid: int) -> bool:
    """Whether it lives in process ids of its own: `cluster_hosts` ends these, its tests look at what runs there."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False  # gone meanwhile, or a zombie


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:100]!r} ({process.status()})"
    except psutil.NoSuchProcess:
        return f"{process.pid} (just ended, unwaited)"


def _changed(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = sorted(set(before) | set(now))
    return [name for name in names if before.get(name) != now.get(name) and name not in IGNORED_VARIABLES]


def _frameworks() -> set[str]:
    return {name for name in FRAMEWORKS if name in sys.modules}


@pytest.fixture
def mount() -> Iterator[Callable[[str, Path, str], None]]:
    """Mount a small file system on a new folder; skips the test, with the reason, where that is not
    allowed."""
    mounted: list[Path] = []

    def do(kind: str, folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", kind, "-o", options, kind, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a {kind}: {done.stderr.strip()}")
        mounted.append(folder)

    yield do
    gc.collect()  # the traceback of an expected error holds a Checkpointer, which holds its directory
    for folder in reversed(mounted):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Horovod's real source distribution: from the set-up's cache, else from PyPI."""
    from hvdtrain.horovod_build import build, steps

    cache = build.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    return build.fetch_sdist(cache, steps.Commands(tmp_path_factory.mktemp("log") / "log", print))
