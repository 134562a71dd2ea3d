#!/usr/bin/env python
"""Makes a folder to carry to a machine with a GPU and no network: wheels, and the script that checks hvdtrain there.

    scripts/gpu_kit.sh                          gpu-kit: for Python 3.12 with torch 2.11, torchvision and mpi4py
    scripts/gpu_kit.sh FOLDER --python /opt/python3.12/bin/python3.12

Horovod is compiled with NCCL by `hvdtrain build-horovod`, in an environment with that torch (4 GB, kept in a cache);
beside it are hvdtrain's own wheel, and the packages of setup.cfg that do not come with torch, torchvision and mpi4py.
What cannot be had here is named, with the reason, and the rest is made; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MIB = 60
THERE = ("torch=={torch}", "torchvision=={torchvision}", "mpi4py")
# of setup.cfg: what the checks use beside those
EXTRAS, NOT_CARRIED = ("torch", "keras", "build"), ("torch", "torchvision", "tensorflow-cpu", "setuptools", "wheel")
BUILT_WITH = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi", "numpy")
COPIED = ("hvdtrain", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
# printed by missing.py on the other machine: the wheels of what its Python lacks
MISSING = """\
import importlib.metadata, pathlib, re, sys

there = {re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()}
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
    if name not in there or name in ("hvdtrain", "horovod", "keras"):
        print(wheel)
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=ROOT / "gpu-kit", metavar="FOLDER", help="(default: gpu-kit)")
    add("--python-version", default="3.12", metavar="X.Y", help="of the other machine (default: %(default)s)")
    add("--torch", default="2.11.0", metavar="V", help="there (default: %(default)s)")
    add("--torchvision", default="0.26.0", metavar="V", help="there (default: %(default)s)")
    add("--python", metavar="PATH", help="that version, to compile Horovod with (default: looked for)")
    add("--horovod", type=Path, metavar="WHEEL", help="take this wheel of Horovod, and compile none")
    add("--cache", type=Path, default=Path.home() / ".cache" / "hvdtrain" / "gpu-kit", metavar="DIR")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    missing: dict[str, str] = {}

    def attempt(what: str, make: Callable[[], object]) -> None:
        print(f"gpu-kit: {what}", flush=True)
        try:
            make()
        except (RuntimeError, OSError) as error:
            missing[what] = str(error)

    attempt("hvdtrain", lambda: _own_wheel(wheels))
    attempt("packages", lambda: _packages(wheels, args))
    attempt("Horovod with NCCL", lambda: _horovod(wheels, args))
    shutil.copy2(ROOT / "scripts" / "gpu_check.sh", folder)
    (folder / "missing.py").write_text(MISSING, encoding="utf-8")
    mib = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    if mib > LIMIT_MIB:
        missing["size"] = f"{mib:.1f} MiB are more than {LIMIT_MIB}"
    record = {
        "for": {"python": args.python_version, "torch": args.torch, "torchvision": args.torchvision},
        "wheels": {path.name: path.stat().st_size for path in sorted(wheels.iterdir())}, "missing": missing,
    }  # fmt: skip
    (folder / "kit.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for what, reason in missing.items():
        print(f"gpu-kit: MISSING {what}: {reason}")
    print(f"gpu-kit: {folder}, {mib:.1f} MiB, {len(record['wheels'])} wheels; there: bash gpu_check.sh")
    return 1 if missing else 0


def _run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(f"`{' '.join(map(str, command[:6]))} ...` ended with {done.returncode}: {last[-1]}")
    return done.stdout


def _own_wheel(wheels: Path) -> None:
    """Of a copy: setuptools leaves folders beside what it builds."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, Path(folder, name))
        # what builds it, in this environment or, without, from the index
        here = all(map(importlib.util.find_spec, ("setuptools", "wheel")))
        isolated = ["--no-build-isolation"] if here else []
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *isolated, "-w", wheels, folder)


def _packages(wheels: Path, args: argparse.Namespace) -> None:
    """What setup.cfg asks for and what that needs, but for what is there."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = [config["options"]["install_requires"], *(config["options.extras_require"][name] for name in EXTRAS)]
    requirements = [line for lines in wanted for line in lines.split("\n") if line and _name(line) not in NOT_CARRIED]
    there = _resolved([line.format(torch=args.torch, torchvision=args.torchvision) for line in THERE], args)
    found = _resolved(requirements, args)
    needed = [f"{name}=={version}" for name, version in sorted(found.items()) if name not in there]
    _pip(args, "download", "--no-deps", "-d", str(wheels), *needed)


def _resolved(requirements: Iterable[str], args: argparse.Namespace) -> dict[str, str]:
    """The packages that an empty environment of that Python gets, with their versions."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        target = ["--target", folder, "--ignore-installed", "--dry-run", "--report", str(report)]
        _pip(args, "install", *target, *requirements)
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {_name(its["metadata"]["name"]): its["metadata"]["version"] for its in packages}


def _pip(args: argparse.Namespace, verb: str, *rest: str) -> None:
    """pip for the other Python, whatever this one is: wheels only."""
    of = ["--python-version", args.python_version, "--only-binary=:all:"]
    _run(sys.executable, "-m", "pip", verb, "-q", *of, *rest)


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[; ]", requirement)[0]).lower()


def _horovod(wheels: Path, args: argparse.Namespace) -> None:
    if args.horovod:
        shutil.copy2(args.horovod, wheels)
        return
    python = args.python or _find_python(args.python_version)
    home = args.cache / f"python{args.python_version}-torch{args.torch}"
    ready, own = home / "ready", home / "bin" / "python"
    if not ready.is_file():
        print(f"gpu-kit: torch {args.torch} for {python}, into {home}", flush=True)
        _run(python, "-m", "venv", "--clear", home)
        frameworks = [f"torch=={args.torch}", f"torchvision=={args.torchvision}"]
        _run(own, "-m", "pip", "install", "-q", *frameworks, *BUILT_WITH)
        ready.touch()
    variables = os.environ | {
        "PYTHONPATH": str(ROOT), "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(home),
    }  # fmt: skip
    build = ["-m", "hvdtrain", "build-horovod", "--gpu", "nccl", "--mpi", "off", "--output", str(wheels)]
    _run(own, *build, env=variables, cwd=home)


def _find_python(version: str) -> str:
    """An interpreter of that version: on PATH, or of pyenv (whose shim may stand for another).

    Raises:
        RuntimeError: none is found.
    """
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in [*map(str, kept), shutil.which(f"python{version}")]:
        told = candidate and subprocess.run([candidate, "--version"], capture_output=True, text=True).stdout
        if candidate and told and told.startswith(f"Python {version}."):
            return candidate
    raise RuntimeError(f"no Python {version} is found: install it (uv python install {version}), or --python PATH")


if __name__ == "__main__":
    sys.exit(main())
