"""A wheel for other machines from end to end: made here, then installed by pip, and training."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness import MPI, REPOSITORY

from hvdtrain.horovod_build import build, dist

SITE = Path(sysconfig.get_paths()["purelib"])


def recipe(*arguments: str, python: str | Path = sys.executable, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-m", "hvdtrain", "build-horovod", *arguments],
        capture_output=True, text=True, timeout=550,
        env={**os.environ, **MPI, "PYTHONPATH": str(REPOSITORY), **variables},
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    if importlib.util.find_spec("auditwheel") is None:
        pytest.skip("auditwheel is not installed (pip install 'hvdtrain[dist]')")
    if "is cached" not in recipe("--check").stdout:
        pytest.skip(f"no wheel is cached, and to build one takes minutes: {build.cache_folder()}")
    folder = tmp_path_factory.mktemp("wheels")
    made = recipe("--dist", str(folder), PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}")
    assert made.returncode == 0, made.stderr
    assert "it needs Linux with glibc 2." in made.stdout
    return folder


@pytest.fixture
def machine(tmp_path) -> Path:
    """An environment that has the frameworks, each as a link, and no Horovod; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    for path in SITE.iterdir():
        if not path.name.lower().startswith(("horovod", "hvdtrain", "__editable__")):
            (site / path.name).symlink_to(path)
    return tmp_path / "env" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_wheel_for_others_is_proven_and_needs_no_compiler(wheels, machine):
    (wheel,) = wheels.glob("*.whl")
    version = wheel.name.split("-")[1]
    assert subprocess.run([machine, "-c", "import horovod"], capture_output=True).returncode == 1  # the twin
    alone = {"PATH": str(machine.parent), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    install = [str(machine), "-m", "pip", "install", "-q", "--find-links", str(wheels), dist.NAME]
    done = subprocess.run(install, capture_output=True, text=True, env=os.environ | alone)
    assert done.returncode == 0, done.stderr
    program = (
        "from hvdtrain.cluster.hosts import probe; from hvdtrain.record import stats\n"
        "print(probe._packages()['horovod'], stats.versions('horovod')['horovod'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run([machine, "-c", program], env=environment, capture_output=True, text=True)
    assert shown.stdout.split() == [version, version], shown.stderr
    ranks = [machine, "-m", "hvdtrain", "verify", "--framework", "torch", "--device", "cpu"]
    proven = subprocess.run(ranks, env=environment, capture_output=True, text=True, timeout=150)
    assert proven.returncode == 0 and "torch: ok" in proven.stdout, proven.stdout + proven.stderr
