"""A ready wheel from end to end: made here, then installed and proven where there is no compiler."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from harness import MPI, REPOSITORY

from hvdtrain.horovod_build import build, dist

SITE = Path(sysconfig.get_paths()["purelib"])
LIMIT_S = 60


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


def spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.thorough
def test_ready_and_proven_within_a_minute_without_a_compiler(wheels, machine, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "env"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    bare = {"PATH": f"{machine.parent}:{tools}", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    # the twins: no compiler is there, nor a Horovod
    assert "g++ is not installed" in recipe("--check", python=machine, **bare).stderr
    assert subprocess.run([machine, "-c", "import horovod"], capture_output=True).returncode == 1
    for wheel in wheels.glob("*.whl"):  # without mpirun the version without MPI is asked for
        if ".openmpi-" in wheel.name:
            (tools / "mpirun").symlink_to(str(shutil.which("mpirun")))
    started, cpu_s = time.monotonic(), spent_s()
    done = recipe("--ready", str(wheels), python=machine, **bare)
    seconds, cpu_s = time.monotonic() - started, spent_s() - cpu_s
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed and proven: hvdtrain-horovod 0.28.1+torch2." in done.stdout
    assert "torch over Gloo" in done.stdout and "tensorflow over Gloo" in done.stdout
    assert ("torch over MPI" in done.stdout) == (tools / "mpirun").exists(), "though there is no ssh"
    print(f"ready and proven in {seconds:.1f} s, {cpu_s:.1f} s of processor time")
    # of a machine that does something else as well the clock says nothing; alone it takes less, as ranks share the work
    assert cpu_s < LIMIT_S, f"{cpu_s:.0f} s of processor time"
    # what hvdtrain sees of it
    program = (
        "from hvdtrain.cluster.hosts import probe; from hvdtrain.record import stats\n"
        "print(probe._packages()['horovod'], stats.versions('horovod')['horovod'])"
    )
    shown = subprocess.run(
        [machine, "-c", program], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    (version,) = {wheel.name.split("-")[1] for wheel in wheels.glob("*.whl")}
    assert shown.stdout.split() == [version, version], shown.stderr
    # and as anybody installs it
    command = [str(machine), "-m", "pip", "install", "--dry-run", "--no-index", "--force-reinstall", "--no-deps"]
    plain = subprocess.run(
        [*command, "--find-links", str(wheels), dist.NAME], capture_output=True, text=True, env=os.environ | bare
    )
    assert f"Would install {dist.NAME}-{version}" in plain.stdout, plain.stderr
