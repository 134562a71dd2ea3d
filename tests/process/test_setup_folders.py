"""scripts/setup.sh leaves alone what is not its own, repairs what is, and names first what cannot be used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY

# stands for an interpreter: notes what it is to do; makes environments, and clears them first, as Python's venv does
INTERPRETER = """\
#!/bin/sh
echo "$*" >>"{asked}"
case "$*" in
  "-m pip --version") {pip} ;;
  "-m pip install"*) {install} ;;
  "-m venv"*)
    for folder; do :; done
    case "$*" in *--clear*) rm -rf "$folder"/* ;; esac
    mkdir -p "$folder/bin"
    touch "$folder/pyvenv.cfg"
    rm -f "$folder/bin/python"
    cp "{whole}" "$folder/bin/python" ;;
esac
"""
NOT_ONE = "#!/bin/sh\nexit 1\n"


class Machine:
    """Programs that stand for the system's: it has room, and no packages are missing, or can be had."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venv, self.asked = folder, folder / "venv", folder / "asked"
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.whole = self.interpreter("whole")
        self.tool("df", "#!/bin/sh\necho Header\necho /dev/sda 100000000 1 99999999 1% /\n")
        self.tool("apt-get", NOT_ONE)
        for name in ("g++", "make", "cmake", "mpicxx", "mpirun"):
            self.tool(name, "#!/bin/sh\n")
        self.python = self.interpreter("python3.12")

    def tool(self, name: str, text: str) -> Path:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def interpreter(self, name: str, pip: str = ":", install: str = ":") -> Path:
        whole = self.tools / "whole"
        return self.tool(name, INTERPRETER.format(asked=self.asked, pip=pip, install=install, whole=whole))

    def environment(self, python: Path | None) -> None:
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "pyvenv.cfg").touch()
        (self.venv / "mine").write_text("a package that was installed by hand")
        if python is not None:
            (self.venv / "bin" / "python").symlink_to(python)

    def __call__(
        self, script: str = ". scripts/setup.sh; echo goes on", **variables: str
    ) -> subprocess.CompletedProcess:
        self.asked.write_text("")
        own = {"HVDTRAIN_VENV": str(self.venv), "PYTHON": str(self.python), "PIP_NO_INDEX": "1"}
        path = {"PATH": f"{self.tools}:{os.environ['PATH']}"}
        return subprocess.run(
            [shutil.which("bash") or "bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=REPOSITORY,
            env={**os.environ, **path, **own, **variables},
        )  # fmt: skip

    def made(self) -> list[str]:
        """Returns how an environment was made."""
        return [line for line in self.asked.read_text().splitlines() if line.startswith("-m venv")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("what", ["a folder", "a file"])
def test_what_is_no_environment_is_left_as_it_is(what: str, machine: Machine) -> None:
    kept = machine.venv
    if what == "a folder":
        machine.venv.mkdir()
        kept = machine.venv / "thesis.txt"
    kept.write_text("years of work")
    done = machine()
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert f"{machine.venv} is not an environment of Python, and not empty. Set HVDTRAIN_VENV" in done.stderr
    assert kept.read_text() == "years of work" and not machine.asked.read_text(), "nothing was begun"


@pytest.mark.parametrize("there", [None, "empty"])
def test_a_new_folder_and_an_empty_one_become_an_environment(there: str | None, machine: Machine) -> None:
    """The twin of what is refused."""
    if there:
        machine.venv.mkdir()
    done = machine()
    assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr
    assert len(machine.made()) == 1 and (machine.venv / ".ready").is_file()


@pytest.mark.parametrize(
    ("state", "how", "kept"),
    [
        ("whole", None, True),
        ("without pip", "-m venv {}", True),
        ("its Python has gone", "-m venv --clear {}", False),
        ("half made", "-m venv --clear {}", False),
    ],
)
def test_an_environment_is_repaired_and_made_anew_only_where_its_python_does_not_run(
    state: str, how: str | None, kept: bool, machine: Machine
) -> None:
    python = {
        "whole": machine.whole,
        "without pip": machine.interpreter("without-pip", pip="exit 1"),
        "its Python has gone": machine.folder / "gone" / "python3.9",
        "half made": None,
    }[state]
    machine.environment(python)
    done = machine()
    assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr
    assert machine.made() == ([] if how is None else [how.format(machine.venv)])
    assert (machine.venv / "mine").exists() == kept
    assert (machine.venv / ".ready").is_file()


@pytest.mark.parametrize("what", ["absent", "a file"])
def test_a_temporary_folder_that_cannot_be_used_is_named(what: str, machine: Machine) -> None:
    temporary = machine.folder / "temporary"
    if what == "a file":
        temporary.write_text("")
    done = machine(TMPDIR=str(temporary))
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert done.stderr == f"setup: TMPDIR={temporary} is not a folder that can be written. Set TMPDIR=/tmp\n"
    assert not machine.asked.read_text() and not machine.venv.exists(), "nothing was begun"
    temporary.unlink(missing_ok=True)
    temporary.mkdir()
    assert machine(TMPDIR=str(temporary)).returncode == 0, "the twin"


@pytest.mark.parametrize("what", ["absent", "another release", "of the system"])
def test_a_python_that_cannot_be_used_is_named(what: str, machine: Machine) -> None:
    variables, named = {"PYTHON": str(machine.tool("python2", NOT_ONE))}, f"PYTHON={machine.tools}/python2"
    if what == "absent":
        (machine.tools / "python2").unlink()
    if what == "of the system":  # and no other on the PATH
        for name in ("cat", "cut", "dirname", "ls", "sha256sum", "tail"):
            machine.tool(name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
        machine.tool("python3", NOT_ONE)
        (machine.tools / "python3.12").unlink()
        variables, named = {"PYTHON": "", "PATH": str(machine.tools)}, "python3"
    done = machine(**variables)
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert done.stderr == (
        f"setup: Python 3.10 to 3.13 is needed, and {named} is not one."
        " Install one, or set PYTHON=/path/to/python3.13\n"
    )
    assert not machine.asked.read_text() and not machine.venv.exists(), "nothing was begun"


REAL = f"PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX= {sys.executable} -m pip --isolated install -q --dry-run --no-deps"
BROKEN = "echo 'WARNING: Retrying after connection broken by {}'; exit 1"
# what pip does: whether the network is the cause. The twins: a package that no index has, a compiler's words
FAILURES = {
    "refused": (f"{REAL} --retries 1 --index-url http://127.0.0.1:1/simple nothing-such", True),
    "a firewall": (BROKEN.format("ConnectTimeoutError"), True),
    "slow": (BROKEN.format("ReadTimeoutError"), True),
    "a proxy": (BROKEN.format("ProxyError"), True),
    "no such package": (f"{REAL} --no-index connection-pool", False),
    "a compiler": ("echo 'connection.cc:7: error: resolution of overloaded function'; exit 1", False),
}


@pytest.mark.parametrize("cause", FAILURES)
def test_an_index_out_of_reach_is_named_as_the_cause(cause: str, machine: Machine) -> None:
    failure, unreached = FAILURES[cause]
    machine.environment(machine.interpreter("fails", install=failure))
    done = machine()
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert "setup: failed: installing PyTorch, TensorFlow and Keras" in done.stderr
    hinted = "the package index, or the mirror, was not reached: check the network, and pip's settings" in done.stderr
    assert hinted == unreached, done.stderr
    assert not (machine.venv / ".ready").exists()


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize(
    ("script", "shown"), [("train.sh", "NP=4 scripts/train.sh"), ("test.sh", "scripts/test.sh --quick")]
)
def test_help_is_shown_and_nothing_set_up(script: str, shown: str, option: str, machine: Machine) -> None:
    done = machine(f"scripts/{script} {option}")
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = (REPOSITORY / "scripts" / script).read_text().splitlines()
    comments = [line.removeprefix("# ").removeprefix("#") for line in lines[1:] if line.startswith("#")]
    assert shown in done.stdout and done.stdout.splitlines() == comments
    assert not machine.asked.read_text() and not machine.venv.exists()
