"""The ``hvdtrain`` command as a user meets it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from hvdtrain import __main__


def hvdtrain(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "hvdtrain", *arguments], capture_output=True, text=True, timeout=60)


def test_help_lists_every_command():
    done = hvdtrain("--help")
    assert done.returncode == 0
    for name, (_, line) in __main__.COMMANDS.items():
        assert name in done.stdout and line.split()[0] in done.stdout


def test_no_command_prints_help():
    assert "COMMAND" in hvdtrain().stdout


@pytest.mark.parametrize("name", sorted(__main__.COMMANDS))
def test_every_command_has_help(name):
    done = hvdtrain(name, "--help")
    assert done.returncode == 0 and f"hvdtrain {name}" in done.stdout, done.stderr


def test_a_wrong_command_is_refused():
    done = hvdtrain("bulid-horovod")
    assert done.returncode == 2 and "bulid-horovod" in done.stderr and "Traceback" not in done.stderr


def test_help_imports_no_subcommand():
    program = "import sys; from hvdtrain import __main__\ntry: __main__.main(['--help'])\nexcept SystemExit: pass\n"
    program += "print([m for m in sys.modules if m in ('numpy', 'torch', 'tensorflow', 'hvdtrain.horovod_build')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_reader_that_stops_early_gets_no_traceback():
    command = f"{sys.executable} -m hvdtrain build-horovod --edits | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout and "Traceback" not in done.stderr


def test_sigterm_ends_what_a_command_started(tmp_path):
    """A stopped build must not leave compilers behind: they run in a session of their own."""
    program = f"""
import sys
from pathlib import Path
import hvdtrain.horovod_build as recipe
from hvdtrain import __main__ as cli
from hvdtrain.horovod_build.steps import Steps

CHILD = "import os, threading; print('child', os.getpid(), flush=True); threading.Event().wait(60)"
show = lambda line: print(line, flush=True)
recipe.run = lambda args: Steps(Path({str(tmp_path / "log")!r}), show)("", [sys.executable, "-c", CHILD], progress=show)
sys.exit(cli.main(["build-horovod"]))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = next(int(line.split()[1]) for line in parent.stdout if line.startswith("child"))
    parent.terminate()
    assert parent.wait(timeout=20) == 143
    parent.stdout.close()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
