"""The proof that a Horovod works: two ranks of every framework, over every controller."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build.steps import Commands

PROOF_TIMEOUT_S = 120


def prove(wheel: Path, frameworks: list[str], run: Commands, *, mpi: str | None, nccl: bool) -> list[str]:
    """Runs two ranks of every framework over every controller, in a folder of their own; returns their lines.

    Args:
        frameworks: "torch", "tensorflow".
        mpi: the first line of `mpirun --version`, if the wheel has MPI.
        nccl: the wheel has NCCL.

    Raises:
        HvdtrainError: a run failed, timed out, or not every rank printed its proof.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-proof-") as scratch:
        site, elsewhere = Path(scratch) / "site", Path(scratch) / "run"
        elsewhere.mkdir()
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
        install.append(str(wheel))
        run("proving the wheel: check-build, then 2 ranks of each framework over each controller", install)
        variables = proof_environment(site)
        built = run("  check-build", [*_HOROVODRUN, "--check-build"], env=variables, cwd=elsewhere)
        names = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
        wanted = [*(names[one] for one in frameworks), "Gloo", *["MPI"] * bool(mpi), *["NCCL"] * nccl]
        if missing := [name for name in wanted if f"[X] {name}" not in built]:
            rule = "check-build must list everything this build was asked for"
            raise HvdtrainError(rule, f"missing {', '.join(missing)} in:\n{built}", "read the build log")
        lines = [f"check-build: {', '.join(wanted)}"]
        return lines + _prove_ranks(frameworks, _launchers(mpi), variables, elsewhere, run)


def _prove_ranks(
    frameworks: list[str], launchers: dict[str, list[str]], variables: dict[str, str], folder: Path, run: Commands
) -> list[str]:
    lines: list[str] = []
    for framework in frameworks:
        for name, launcher in launchers.items():
            module = [sys.executable, "-m", "hvdtrain.horovod_build.prove_rank", framework]
            what = f"  {framework} over {name}"
            printed = run(what, launcher + module, env=variables, cwd=folder, timeout_s=PROOF_TIMEOUT_S)
            found = re.findall(rf"{framework} rank \d of 2 over \w+ \(built with [^)]*\): proven", printed)
            if len(found) != 2 or any(f"over {name}" not in line for line in found):
                rule = f"2 ranks of {framework} over {name} must each prove the collectives"
                raise HvdtrainError(rule, f"{len(found)} did: {'; '.join(found) or 'none'}", f"read {run.log}")
            lines += sorted(found)
    return lines


_HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch"]


def _launchers(mpi: str | None) -> dict[str, list[str]]:
    launchers = {"Gloo": [*_HOROVODRUN, "--gloo", "-np", "2"]}
    if mpi:
        mpirun = ["mpirun", "-np", "2"]
        if "Open MPI" in mpi or "open-mpi" in mpi.lower():
            mpirun += ["--oversubscribe", "--bind-to", "none"]
        launchers["MPI"] = mpirun
    return launchers


def proof_environment(site: Path) -> dict[str, str]:
    """Returns the caller's environment, with the new wheel in `site` first, and this package importable."""
    package_parent = Path(__file__).resolve().parents[2]
    variables = dict(os.environ)
    places = [site, package_parent, os.environ.get("PYTHONPATH")]
    variables["PYTHONPATH"] = ":".join(str(place) for place in places if place)
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if os.geteuid() == 0:  # Open MPI refuses root unless told twice; the proof starts only our own program
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not (shutil.which("ssh") or shutil.which("rsh")):  # without them Open MPI 4 starts no ranks here either
        variables["OMPI_MCA_plm"] = "isolated"
    return variables
