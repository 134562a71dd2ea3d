"""What pip makes of ready wheels: which it takes, and which it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import packaging
import pip
import pytest
from harness import REPOSITORY
from tiny_wheels import tiny_wheel

from hvdtrain.horovod_build import dist

HEAD = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """For three releases of PyTorch, and for a CUDA build of one."""
    folder = tmp_path_factory.mktemp("wheels")
    base = tiny_wheel(folder, metadata=HEAD)
    for torch, cuda, needs in (
        ("2.11", None, []), ("2.12", None, []), ("2.13", None, []), ("2.12", "13.0", ["nvidia-nccl-cu13"]),
    ):  # fmt: skip
        version = dist.version_for(torch, cuda, "2.21", None)
        dist.rename(base, folder, version, [f"torch=={torch}.*", *needs])
    base.unlink()
    return folder


@pytest.fixture
def place(tmp_path) -> SimpleNamespace:
    """An empty environment, and what puts packages into it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    own = tmp_path / "packages"
    own.mkdir()

    def install(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env"), "--isolated", "install", *words]
        alone = {**os.environ, "PIP_CONFIG_FILE": os.devnull}  # --isolated reads the machine's settings all the same
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=alone)

    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")

    def have(name: str, version: str) -> None:
        with zipfile.ZipFile(tiny_wheel(own, name, version, HEAD)) as packed:
            packed.extractall(site)

    return SimpleNamespace(pip=install, have=have, site=site, python=str(tmp_path / "env" / "bin" / "python"))


def test_pip_takes_the_wheel_for_the_pytorch_that_is_there(wheels, place):
    place.have("torch", "2.12.1")
    done = place.pip("--no-index", "--find-links", str(wheels), dist.NAME)
    assert done.returncode == 0, done.stderr
    program = "import importlib.metadata as m; print(m.version('hvdtrain-horovod'), m.version('torch'))"
    shown = subprocess.run([place.python, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["0.28.1+torch2.12cpu.tf2.21", "2.12.1"]


def recipe(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-m", "hvdtrain.horovod_build", *arguments], capture_output=True, text=True, timeout=120,
        cwd=REPOSITORY,
    )  # fmt: skip


CUDA_BUILD = """\
from types import SimpleNamespace
__version__, version = "2.12.1+cu130", SimpleNamespace(cuda="13.0", hip=None)
compiled_with_cxx11_abi = lambda: True
"""


def test_a_wheel_without_nccl_is_none_for_a_cuda_build(wheels, place, tmp_path):
    """The whole version is asked for: pip alone takes one for CPUs, which loads beside it, without NCCL."""
    place.have("torch", "2.12.1")
    (place.site / "torch" / "__init__.py").write_text(CUDA_BUILD)
    (place.site / "pip").symlink_to(Path(pip.__file__).parent)
    done = recipe("--ready", str(wheels), python=place.python)
    assert done.returncode == 2 and "of version 0.28.1+torch2.12cu130" in done.stderr, done.stderr
    assert f"pip finds none at {wheels}" in done.stderr and "build-horovod --install" in done.stderr
    assert not (place.site / "horovod").exists()
    assert place.pip("--no-index", "--find-links", str(wheels), dist.NAME).returncode == 0  # the twin
    assert (place.site / "horovod").exists()


def test_a_ready_wheel_needs_the_frameworks_first(place, wheels):
    done = recipe("--ready", str(wheels), python=place.python)
    assert done.returncode == 2 and "neither torch nor tensorflow is installed here" in done.stderr


@pytest.fixture
def working(place, tmp_path) -> SimpleNamespace:
    """`place` with a PyTorch (in name), pip, and the module `horovod` of a distribution `horovod`."""
    place.have("torch", "2.12.1+cu130")
    (place.site / "torch" / "__init__.py").write_text(CUDA_BUILD)
    for path in (Path(pip.__file__).parent, Path(packaging.__file__).parent):
        (place.site / path.name).symlink_to(path)
    place.have("horovod", "0.28.0")
    place.wheels = tmp_path / "ready"
    place.wheels.mkdir()

    def ready(metadata: str = HEAD) -> Path:
        version = dist.version_for("2.12", "13.0", None, None)
        made = tiny_wheel(place.wheels, dist.NAME, version, metadata)
        text = f"__version__ = {version!r}\n" * 1000  # long enough that a byte can go wrong in it
        files = {}
        with zipfile.ZipFile(made) as packed:
            files = {name.replace(f"{dist.NAME}/", "horovod/"): packed.read(name) for name in packed.namelist()}
        files["horovod/__init__.py"] = text.encode()
        record = next(name for name in files if name.endswith("/RECORD"))
        files[record] = files[record].replace(f"{dist.NAME}/".encode(), b"horovod/")
        made.unlink()
        target = place.wheels / f"hvdtrain_horovod-{version}-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as packed:
            for name, data in files.items():
                packed.writestr(name.replace("hvdtrain-horovod", "hvdtrain_horovod"), data)
        return target

    def there() -> tuple[str, str]:
        """The module's version, and the distributions of it, as a new process finds them."""
        program = (
            "import importlib.metadata as m, horovod; print(horovod.__version__,"
            " *sorted(d.name for d in m.distributions() if 'horovod' in d.name))"
        )
        done = subprocess.run([place.python, "-c", program], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        version, *names = done.stdout.split()
        return version, " ".join(names)

    place.ready, place.there = ready, there
    return place


NEW = "0.28.1+torch2.12cu130"
SWAP = "import sys; from pathlib import Path; from hvdtrain.horovod_build import swap; swap.replace(Path(sys.argv[1]))"


def test_of_two_distributions_of_one_module_none_is_left_over(working):
    wheel = working.ready()
    assert working.pip("--no-index", "--no-deps", str(wheel)).returncode == 0
    assert working.there() == (NEW, f"horovod {dist.NAME}"), "pip lays one over the other"
    subprocess.run([working.python, "-c", SWAP, str(wheel)], check=True, timeout=60, cwd=REPOSITORY)
    assert working.there() == (NEW, dist.NAME)


def refused(working: SimpleNamespace, where: Path | str, *words: str, **variables: str) -> None:
    with mock.patch.dict(os.environ, variables):
        done = recipe("--ready", str(where), python=working.python)
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert working.there() == ("0.28.0", "horovod"), "a refusal changes nothing"


def test_what_is_not_proven_is_not_installed(working, tmp_path):
    """It is no Horovod at all; what is said names a log that is there."""
    working.ready()
    refused(working, working.wheels, "check-build: failed", "ready.log", HVDTRAIN_CACHE=str(tmp_path / "cache"))
    assert (tmp_path / "cache" / "horovod" / "ready.log").stat().st_size > 0


def test_refusals_name_what_is_wrong(working, tmp_path):
    refused(working, tmp_path / "nowhere", "pip finds none", "nowhere")
    wheel = working.ready()
    data = bytearray(wheel.read_bytes())
    data[data.index(b"__version__") + 5000] ^= 1
    wheel.write_bytes(data)
    refused(working, working.wheels, "is damaged: horovod/__init__.py", "copy it again")
    wheel.write_bytes(data[: len(data) // 2])
    refused(working, working.wheels, "pip finds none", wheel.name)
    working.ready(HEAD + "Requires-Dist: cloudpickle>=2\nRequires-Dist: torch==2.12.*\n")
    refused(working, working.wheels, "must find what it needs", "cloudpickle>=2")
