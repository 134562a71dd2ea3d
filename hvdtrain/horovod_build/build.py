"""From source distribution to a proven, cached wheel."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.core import variables
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import patching
from hvdtrain.horovod_build.environment import Environment, mpi_rpath
from hvdtrain.horovod_build.proof import prove
from hvdtrain.horovod_build.steps import Commands, Say
from hvdtrain.horovod_build.support import (
    CUDA_ARCHITECTURES,
    CUDA_WHEELS,
    HOROVOD_VERSION,
    SDIST_SHA256,
    torch_cxx_standard,
)


def find_toolkit(version: str, *, source: str, cache: Path, run: Commands) -> tuple[dict[str, str], str]:
    """Returns variables for Horovod's build with a CUDA compiler of `version` ("13.0"), and its origin in words.

    Args:
        source: "auto" (a complete installed toolkit of that version, else wheels), "wheels", or a toolkit's folder.
        cache: folder that keeps the assembled toolkit between builds.

    Raises:
        HvdtrainError: no such compiler can be had; the message names the wheels or the folder that were tried.
    """
    toolkit = _installed_toolkit(version, source) if source != "wheels" else None
    home = toolkit or _home_from_wheels(version, cache, run)
    variables = dict.fromkeys(("CUDA_HOME", "HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT"), str(home))
    variables |= {
        "CUDACXX": str(home / "bin" / "nvcc"),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": CUDA_ARCHITECTURES.get(version, "80,90"),
    }
    # NCCL of the framework's own wheel: both use one library; under the name the linker wants; else CMake searches
    if library := _of_framework("nccl/lib/libnccl.so.2"):
        nccl = cache / "nccl"
        _link(nccl / "lib" / "libnccl.so", str(library))
        _link(nccl / "include", str(library.parent.parent / "include"))
        variables["HOROVOD_NCCL_HOME"] = str(nccl)
    if headers := _of_framework("cu13/include"):  # cuBLAS and others, which PyTorch's headers include
        variables["CPATH"] = str(headers)
    return variables, f"toolkit {toolkit}" if toolkit else f"wheels {', '.join(CUDA_WHEELS[version])}"


def _installed_toolkit(version: str, source: str) -> Path | None:
    installed = [os.environ.get("CUDA_HOME"), f"/usr/local/cuda-{version}", "/usr/local/cuda"]
    candidates = installed if source == "auto" else [source]
    reasons = []
    for candidate in filter(None, candidates):
        reason = _why_incomplete(Path(candidate), version)
        if reason is None:
            return Path(candidate)
        reasons.append(f"{candidate}: {reason}")
    if source != "auto":
        rule = f"--cuda must name a CUDA toolkit of version {version} (PyTorch's; for TensorFlow alone, 13.0)"
        raise HvdtrainError(rule, "; ".join(reasons), "give another folder, or --cuda wheels")
    return None


def _why_incomplete(home: Path, version: str) -> str | None:
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return "no bin/nvcc"
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    if f"release {version}," not in printed:
        last = printed.strip().splitlines()[-1] if printed.strip() else "nothing"
        return f"nvcc is not of release {version} (it prints {last})"
    for needed in ("include/cuda_runtime.h", "lib64/libcudart.so", "lib64/libcudart_static.a"):
        if not (home / needed).exists():
            return f"no {needed}"
    return None


def _home_from_wheels(version: str, cache: Path, run: Commands) -> Path:
    """Installs the compiler's wheels beside each other; one folder then is a CUDA_HOME but for two links.

    nvcc finds its parts relative to its own real path, so it must not be a link into several site-packages.
    """
    if version not in CUDA_WHEELS:
        rule = f"PyPI does not have a usable CUDA compiler except for CUDA {', '.join(CUDA_WHEELS)}"
        received = f"PyTorch was built with CUDA {version}, and no complete toolkit of that version was found"
        remedy = f"install the CUDA {version} toolkit and pass --cuda DIR, or build with --gpu none"
        raise HvdtrainError(rule, received, remedy)
    target = cache / f"cuda-{version}"
    home = target / "nvidia" / "cu13"
    if not (home / "lib64").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(target)]
        run(f"fetching the CUDA {version} compiler from PyPI (about 100 MB)", command + list(CUDA_WHEELS[version]))
        _link(home / "lib" / "libcudart.so", "libcudart.so.13")
        _link(home / "lib64", "lib")  # last: it marks the folder complete
    return home


def _of_framework(path: str) -> Path | None:
    """Returns a file or folder of the CUDA wheels that the framework comes with, if it is there."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(folder) / path for folder in (found and found.submodule_search_locations) or []]
    return next((place for place in places if place.exists()), None)


def _link(name: Path, target: str) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    if name.is_symlink():
        name.unlink()
    name.symlink_to(target)


# extraction filters (PEP 706) came with 3.11.4; the archive's setup.py is run all the same
_DATA: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def cache_folder() -> Path:
    """Returns the folder that keeps wheels: in $HVDTRAIN_CACHE, else in the user's cache folder."""
    own = os.environ.get(variables.CACHE)
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hvdtrain"
    return base / "horovod"


def make_folder(folder: Path, remedy: str) -> None:
    """Makes a folder, unless it is there; raises HvdtrainError if it cannot be made, or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise HvdtrainError(
            "wheels need a folder that this user can write", f"{folder}: {error.strerror}", f"give another: {remedy}"
        ) from error


def cache_key(environment: Environment, cuda: str = "auto") -> str:
    """Hashes of everything that decides what the wheel contains."""
    matters = {
        "horovod": HOROVOD_VERSION,
        "sdist": SDIST_SHA256,
        "patches": [patch.diff for patch in patching.needed(environment.gpu)],  # a better reason compiles nothing again
        "environment": asdict(environment),
        "cuda": [environment.cuda, cuda] if environment.cuda else "",
    }
    return hashlib.sha256(json.dumps(matters, sort_keys=True).encode()).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_cached(folder: Path) -> Path | None:
    """The proven wheel in a cache folder; None when there is none or its checksum no longer fits."""
    record_file = folder / "build.json"
    if not record_file.is_file():
        return None
    record = json.loads(record_file.read_text())
    wheel = folder / record["wheel"]
    return wheel if wheel.is_file() and sha256_of(wheel) == record["sha256"] else None


def build(
    environment: Environment,
    *,
    sdist: Path | None,
    cache: Path,
    cuda: str = "auto",
    jobs: int | None = None,
    say: Say = print,
) -> Path:
    """Builds, proves and caches a wheel; returns its path in the cache.

    The cache entry appears by one rename after the proof, so a stopped build leaves nothing that looks usable. Raises
    HvdtrainError with the last lines of the log of the step that failed.

    Args:
        sdist: horovod-0.28.1.tar.gz, or None to take it from PyPI.
        cuda: see `find_toolkit`.
        jobs: compiler processes at once; default: by cores and memory.
    """
    make_folder(cache, f"{variables.CACHE}=DIR, or --cache DIR")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as scratch:
        work = Path(scratch)
        runner = Commands(cache / "build.log", say)
        archive = sdist or fetch_sdist(cache, runner)
        source = unpack(archive, work / "source")
        patches = patching.needed(environment.gpu)
        patching.apply(source, patches)
        say(f"applied {len(patches)} patches to horovod {HOROVOD_VERSION} (hvdtrain build-horovod --edits lists them)")
        settings = _build_variables(environment, cuda, cache, jobs, runner)
        # Horovod's messages name their source file: horovod/common/..., not this build's scratch folder
        settings["CXXFLAGS"] = f"{os.environ.get('CXXFLAGS', '')} -ffile-prefix-map={source}/="
        wheel = _compile(source, settings, environment, runner)
        proof = prove(wheel, environment.frameworks(), runner, mpi=environment.mpi, nccl=environment.gpu == "nccl")
        key = cache_key(environment, cuda)
        seconds, edits = round(time.monotonic() - started, 1), [patch.name for patch in patches]
        record = {"environment": asdict(environment), "edits": edits, "proof": proof, "seconds": seconds}
        return _store(wheel, cache / key, record)


def fetch_sdist(cache: Path, run: Commands) -> Path:
    """Fetches Horovod's source distribution from PyPI into `cache`, unless it is there.

    pip runs an archive's setup.py to learn its requirements, so pip compares the checksum first (`--require-hashes`).
    """
    archive = cache / f"horovod-{HOROVOD_VERSION}.tar.gz"
    if not archive.is_file() or sha256_of(archive) != SDIST_SHA256:
        archive.unlink(missing_ok=True)
        wanted = cache / "requirements.txt"
        wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod"]
        command += ["--no-build-isolation", "--require-hashes", "-r", str(wanted), "-d", str(cache)]
        run(f"fetching horovod {HOROVOD_VERSION} from PyPI", command)
    return archive


def checked(archive: Path) -> Path:
    """Returns the source distribution; raises HvdtrainError unless it is the very one that the recipe patches."""
    try:
        found = f"sha256 {sha256_of(archive)}"
    except OSError as error:
        found = str(error.strerror)
    if found != f"sha256 {SDIST_SHA256}":
        rule = f"the source must be PyPI's horovod-{HOROVOD_VERSION}.tar.gz, sha256 {SDIST_SHA256}"
        remedy = f"pip download --no-deps --no-binary horovod horovod=={HOROVOD_VERSION}"
        raise HvdtrainError(rule, f"{archive}: {found}", remedy)
    return archive


def unpack(archive: Path, target: Path) -> Path:
    """Unpacks the source distribution; returns its top folder."""
    with tarfile.open(checked(archive)) as tar:
        tar.extractall(target, **_DATA)
    return target / f"horovod-{HOROVOD_VERSION}"


def _build_variables(
    environment: Environment, cuda: str, cache: Path, jobs: int | None, run: Commands
) -> dict[str, str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    settings |= {name: os.environ[name] for name in ("HOROVOD_CMAKE",) if name in os.environ}
    for framework, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        wanted = framework in environment.frameworks()
        settings[f"HOROVOD_WITH_{name}" if wanted else f"HOROVOD_WITHOUT_{name}"] = "1"
    settings["HOROVOD_WITH_MPI" if environment.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    settings |= {"HOROVOD_WITHOUT_MXNET": "1", "HOROVOD_WITH_GLOO": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    settings[variables.TORCH_CXX_STANDARD] = torch_cxx_standard(environment.torch)
    settings |= {variables.MPI_RPATH: mpi_rpath() if environment.mpi else "", "MAKEFLAGS": f"-j{jobs or _jobs()}"}
    if environment.cuda:
        found, origin = find_toolkit(environment.cuda, source=cuda, cache=cache, run=run)
        run.say(f"CUDA compiler: {origin}")
        settings |= found
    return settings


def _jobs() -> int:
    """Compilers at once: one a core, but each may take 2.5 GiB (torch's and TensorFlow's headers)."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_bytes / (2.5 * 2**30))))


def _compile(source: Path, settings: dict[str, str], environment: Environment, run: Commands) -> Path:
    names = " and ".join(environment.frameworks())
    minutes = {1: "2", 2: "3"}[len(environment.frameworks())]
    what = f"compiling Horovod for {names} (about {minutes} minutes on 2 cores)"
    run(what, [sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=source, env=settings, progress=_percent(run.say))
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def _percent(say: Say) -> Callable[[str], None]:
    """Reads make's '[ 42%]' and prints every tenth, with the time since the start."""
    state, started = {"next": 10}, time.monotonic()

    def progress(line: str) -> None:
        found = re.match(r"\[\s*(\d+)%\]", line)
        if found and int(found.group(1)) >= state["next"]:
            done = int(found.group(1))
            state["next"] = done - done % 10 + 10
            say(f"  {done:3d} %  {time.monotonic() - started:4.0f} s")

    return progress


def _store(wheel: Path, folder: Path, record: dict[str, Any]) -> Path:
    """Moves the wheel and its record into the cache by one rename; a broken older entry gives way."""
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    kept = Path(shutil.copy2(wheel, partial))
    record |= {"wheel": wheel.name, "sha256": sha256_of(kept)}
    (partial / "build.json").write_text(json.dumps(record, indent=2) + "\n")
    partial.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return folder / wheel.name
