"""What pip makes of wheels for other machines: which it takes, and what is left of another Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import packaging
import pip
import pytest
from harness import REPOSITORY
from tiny_wheels import tiny_wheel

from hvdtrain.horovod_build import dist

HEAD = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
NEW = "0.28.1+torch2.12cpu.tf2.21"
SWAP = "import pathlib, sys; from hvdtrain.horovod_build.environment import *; put_in_place(pathlib.Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """For three releases of PyTorch."""
    folder = tmp_path_factory.mktemp("wheels")
    base = tiny_wheel(folder, metadata=HEAD)
    for torch in ("2.11", "2.12", "2.13"):
        dist.rename(base, folder, dist.version_for(torch, None, "2.21", None), [f"torch=={torch}.*"])
    base.unlink()
    return folder


@pytest.fixture
def place(tmp_path) -> SimpleNamespace:
    """An environment with a PyTorch (in name), and what puts packages into it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")

    def install(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env"), "--isolated", "install", *words]
        alone = {**os.environ, "PIP_CONFIG_FILE": os.devnull}  # --isolated reads the machine's settings all the same
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=alone)

    def there() -> tuple[str, ...]:
        """The distributions of the module `horovod` with their versions, as a new process finds them."""
        program = (
            "import importlib.metadata as m, horovod;"
            " print(*sorted(f'{d.name} {d.version}' for d in m.distributions() if 'horovod' in d.name), sep='|')"
        )
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
        return tuple(done.stdout.strip().split("|"))

    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    with zipfile.ZipFile(tiny_wheel(tmp_path, "torch", "2.12.1", HEAD)) as packed:
        packed.extractall(site)
    return SimpleNamespace(pip=install, there=there, site=site, python=python, folder=tmp_path)


def test_pip_takes_the_wheel_for_the_pytorch_that_is_there(wheels, place):
    done = place.pip("--no-index", "--find-links", str(wheels), dist.NAME)
    assert done.returncode == 0, done.stderr
    assert place.there() == (f"{dist.NAME} {NEW}",)


def test_of_two_distributions_of_one_module_none_is_left_over(wheels, place):
    place.pip("--no-index", str(tiny_wheel(place.folder, version="0.28.0", metadata=HEAD))).check_returncode()
    (wheel,) = wheels.glob(f"*-{NEW}-*.whl")
    assert place.pip("--no-index", "--no-deps", str(wheel)).returncode == 0
    assert place.there() == ("horovod 0.28.0", f"{dist.NAME} {NEW}"), "pip lays one over the other"
    for path in (Path(pip.__file__).parent, Path(packaging.__file__).parent):
        (place.site / path.name).symlink_to(path)
    subprocess.run([place.python, "-c", SWAP, str(wheel)], check=True, timeout=60, cwd=REPOSITORY)
    assert place.there() == (f"{dist.NAME} {NEW}",)
