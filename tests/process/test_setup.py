"""scripts/setup.sh: which packages it asks for, when it compiles, and when it has nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import REPOSITORY

# stands for the environment's interpreter: notes what it is to do, and does nothing
INTERPRETER = """\
#!/bin/sh
echo "$*" >>"$0.asked"
"""
TRAIN = "-m pip install -q --no-compile --disable-pip-version-check -e .[torch,keras,build,tensorboard,mpi]"
DEV = TRAIN.replace("mpi]", "mpi,dev]")
BUILD = "-m hvdtrain build-horovod --install"


class SetUp:
    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.python.parent.mkdir()
        (folder / "pyvenv.cfg").touch()
        self.asked = folder / "bin" / "python.asked"
        self.variables = {**os.environ, "HVDTRAIN_VENV": str(folder)}
        self.python.write_text(INTERPRETER)
        self.python.chmod(0o755)

    def __call__(self, what: str = "", **variables: str) -> list[str]:
        """Sources it as a script does; returns what it asked of the environment's interpreter."""
        self.asked.write_text("")
        script = f'{what and f"HVDTRAIN_SETUP={what} "}. scripts/setup.sh; echo "${{PATH%%:*}} ${{HVDTRAIN_SETUP:-}}"'
        done = subprocess.run(
            ["bash", "-c", script], cwd=REPOSITORY, env=self.variables | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(self.python.parent)], "what is set up is left to the caller's commands"
        return [line for line in self.asked.read_text().splitlines() if line != "-m pip --version"]  # is it whole?


@pytest.fixture
def set_up(tmp_path) -> SetUp:
    return SetUp(tmp_path)


def test_training_gets_no_tools_and_the_tests_add_them(set_up):
    assert set_up() == [TRAIN, BUILD]
    assert set_up() == []
    assert set_up("dev") == [DEV, BUILD]
    assert set_up("dev") == [] and set_up() == [], "the larger set serves training"


def test_an_environment_of_another_recipe_is_looked_at_again(set_up, tmp_path):
    assert set_up("dev") == [DEV, BUILD]
    stamp = tmp_path / ".ready"
    stamp.write_text("0123456789abcdef dev\n")
    assert set_up() == [TRAIN, BUILD]
    assert stamp.read_text().split()[1] == "train"  # of the tools nothing is known any more
    assert set_up("dev") == [DEV, BUILD]


def test_a_disk_without_room_for_an_environment_is_said_before_anything_is_installed(set_up, tmp_path):
    tools, venv = tmp_path / "tools", tmp_path / "not" / "yet"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho Header\necho /dev/sda 100000000 93700000 6300000 94% /\n")
    (tools / "df").chmod(0o755)
    full = {"HVDTRAIN_VENV": str(venv), "PATH": f"{tools}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        ["bash", "-c", ". scripts/setup.sh; echo goes on"], cwd=REPOSITORY, capture_output=True, text=True,
        env=set_up.variables | full,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert f"needs 8 GB, and {tmp_path} has 6 GB free" in done.stderr and "HVDTRAIN_VENV" in done.stderr
    assert not venv.exists()


def test_a_bare_system_asks_for_all_packages_at_once(set_up, tmp_path):
    packages = "python3 python3-venv g++ make cmake libopenmpi-dev openmpi-bin python3-dev"
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("awk", "cat", "cut", "df", "dirname", "sha256sum"):
        (tools / name).symlink_to(shutil.which(name))
    for name, says in (("apt-get", "exit 1"), ("id", "echo 1000")):
        (tools / name).write_text(f"#!/bin/sh\n{says}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", ". scripts/setup.sh; echo goes on"], cwd=REPOSITORY, text=True, capture_output=True,
        env={"PATH": str(tools), "HVDTRAIN_VENV": str(tmp_path / "venv")},
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout, done.stdout
    assert done.stderr.splitlines()[-1].endswith(f"apt-get install -y --no-install-recommends {packages}"), done.stderr
