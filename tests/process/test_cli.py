"""The ``hvdtrain`` command as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import clean_environment
from run_logs import one_step, open_log
from test_import_process import HEAVY

from hvdtrain.__main__ import COMMANDS, main
from hvdtrain.bench import BENCHES
from hvdtrain.core.errors import EXIT_CODES


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def hvdtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "hvdtrain", *arguments])


def shell(line: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `hvdtrain` with the redirections that a shell makes."""
    return run(["bash", "-c", f"{sys.executable} -m hvdtrain {line}"], cwd=cwd, env=clean_environment(env))


def test_help_lists_every_command():
    done = hvdtrain("--help")
    assert done.returncode == 0
    for name, (_, line) in COMMANDS.items():
        assert name in done.stdout and line.split()[0] in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_its_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert not ended.value.code and f"hvdtrain {name}" in shown
    for code, commands, meaning in EXIT_CODES:
        assert (f"  {code:<7}{meaning}\n" in shown) is (not commands or name in commands.split())


def test_a_wrong_command_is_refused():
    done = hvdtrain("bulid-horovod")
    assert done.returncode == 2 and "bulid-horovod" in done.stderr and "Traceback" not in done.stderr


def imported_by(commands: list[str]) -> set[str]:
    """The modules that are imported after the `--help` of these commands, in one process."""
    program = f"""
import contextlib, io, sys
from hvdtrain import __main__
for command in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        __main__.main([*command.split(), "--help"])
print(*sys.modules)
"""
    env = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}  # it imports, too
    return set(run([sys.executable, "-c", program], env=env).stdout.split())


def test_help_imports_no_subcommand():
    found = imported_by([""])
    assert {n for n in found if n[:9] == "hvdtrain." and n.count(".") == 1} == {"hvdtrain.core", "hvdtrain.__main__"}
    assert not {"subprocess", "socket", "importlib.metadata", *HEAVY} & found


def test_no_help_imports_what_is_heavy():
    """Each `--help` answers in under 0.3 s; a framework alone takes seconds."""
    commands = [*COMMANDS, *(f"bench {name}" for name in BENCHES)]
    assert not {*HEAVY, "matplotlib", "jinja2", "bokeh", "libcst"} - {"multiprocessing"} & imported_by(commands)


def test_the_help_of_one_command_imports_no_other():
    found = imported_by(["launch", "plan", "bench"])
    assert not [name for name in found if name.startswith(("hvdtrain.bench.", "hvdtrain.migrate", "hvdtrain.torch"))]
    assert "http.client" not in found


# ---- standard streams


@pytest.mark.parametrize(("command", "closed"), [("bench", "<&- >&- 2>&-"), ("why .", ">&-")])
def test_commands_run_with_closed_descriptors(tmp_path, command, closed):
    whole, done = [shell(f"{command} {redirected}", cwd=tmp_path) for redirected in ("", closed)]
    assert done.returncode == whole.returncode
    assert done.stdout == ("" if ">&-" in closed.split() else whole.stdout)
    assert done.stderr == ("" if "2>&-" in closed else whole.stderr)


def test_closed_descriptors_are_taken_before_anything_is_opened():
    """Else the first socket is descriptor 1, and what a child process prints goes to whoever is connected to it."""
    program = """
import os, socket, subprocess, sys
import hvdtrain.commands.why as why
from hvdtrain import __main__
def run(args):
    opened = socket.socket()
    ended = subprocess.run(["sh", "-c", "echo child; echo child >&2"]).returncode
    said = opened.fileno() > 2, ended, sys.stdout.write("x"), sys.stdin.read()
    os.write(3, repr(said).encode())
    return 0
why.run = run
__main__.main(["why", "."])
"""
    done = run(["bash", "-c", f'exec {sys.executable} -c "$0" 3>&1 <&- >&- 2>&-', program])
    assert done.stdout == "(True, 0, 1, '')", done.stdout + done.stderr


@pytest.mark.parametrize(("command", "unbuffered"), [("build-horovod --edits", ""), ("--version", "1")])
def test_a_full_disk_under_the_output_gets_no_traceback(command, unbuffered):
    done = shell(f"{command} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.endswith("standard output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("command", ["why", "report"])
def test_characters_that_the_terminal_lacks_are_escaped(tmp_path, command):
    with pytest.raises(ValueError), open_log(tmp_path / "r\u00fcn") as log:
        one_step(log, 1)
        raise ValueError("caf\u00e9")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell(f"{command} r\u00fcn", cwd=tmp_path, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert ("caf\\xe9" if command == "why" else "r\\xfcn/report.html") in done.stdout


@pytest.mark.parametrize("command", ["launch --start-timeout 1e10 -- true", "doctor --timeout 1e10"])
def test_a_number_of_seconds_that_is_too_large_is_refused(command):
    done = shell(command)
    assert done.returncode == 2 and "must be a number of seconds, at most 2000000" in done.stderr, done.stderr


def test_without_threads_a_command_is_refused():
    program = """
import sys, threading
from hvdtrain import __main__
def start(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
sys.exit(__main__.main(["launch", "-np", "1", "--", "true"]))
"""
    done = run([sys.executable, "-c", program], env=clean_environment({}))
    assert done.returncode == 2 and "must be able to start threads" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_doctor_without_files_to_open_says_so():
    done = run(["bash", "-c", f"ulimit -n 8; {sys.executable} -m hvdtrain doctor"])
    assert done.returncode == 2 and "Too many open files" in done.stdout and "Traceback" not in done.stderr


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
from hvdtrain.horovod_build.steps import Commands

CHILD = "import os, threading; print('child', os.getpid(), flush=True); threading.Event().wait(60)"
show = lambda line: print(line, flush=True)
command = [sys.executable, "-c", CHILD]
recipe.run = lambda args: Commands(Path({str(tmp_path / "log")!r}), show)("", command, progress=show)
sys.exit(cli.main(["build-horovod"]))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = next(int(line.split()[1]) for line in parent.stdout if line.startswith("child"))
    parent.terminate()
    assert parent.wait(timeout=20) == 143
    parent.stdout.close()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
