"""The parts of a program around its training: cores, imports, and its end.

It uses only the standard library, so that it reports a missing package within a second, before a
framework is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain.comm.engines import choose_engine
from hvdtrain.core import variables
from hvdtrain.core.errors import (
    ConfigError,
    HvdtrainError,
    LauncherError,
    build_horovod_command,
    exit_with,
    install_command,
)
from hvdtrain.core.launchers import Detected, detect
from hvdtrain.core.version import __version__

# ---- the end

# Launchers kill all ranks when the first one ends. Rank 0 prints an error that every rank has, so the others
# give it this time; they are usually killed within it.
RANK_0_SPEAKS_FIRST_S = 3.0


def run_program(name: str, work: Callable[[Detected], None]) -> int:
    """Runs `work(detected)` and returns 0; an error is printed as one block, and the process ends with it."""
    rank = 0
    try:
        detected = detect(os.environ)
        rank = detected.rank
        work(detected)
    except KeyboardInterrupt:
        exit_with(name, HvdtrainError("interrupted", shared=True), rank)
    except Exception as error:
        if rank and isinstance(error, HvdtrainError) and error.shared:
            time.sleep(RANK_0_SPEAKS_FIRST_S)
        exit_with(name, error, rank)
    return 0


# ---- tuned settings, cores and imports

THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# Ranks that fuse, cut or send otherwise than others add up what does not belong together, or wait for ever.
SAME_ON_ALL = ("HOROVOD_FUSION_THRESHOLD", variables.BUCKET_BYTES, variables.COMPRESSION)
# all that such a file may set
TUNABLE = ("HOROVOD_CYCLE_TIME", "HOROVOD_SHARED_MEMORY", *SAME_ON_ALL, *THREADS)
_PACKAGES = ("horovod", "hvdtrain-horovod", "torch", "tensorflow", "tensorflow-cpu", "keras")


def machine_shape(local_size: int) -> dict[str, str]:
    """Returns what settings were tuned for: ranks on a host, its cores, and versions."""
    import importlib.metadata

    found = {"ranks a host": str(local_size), "cores": str(os.cpu_count()), "hvdtrain": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def tuned(path: str | os.PathLike[str], environ: Mapping[str, str], local_size: int) -> tuple[dict[str, str], str]:
    """Reads the file that `hvdtrain bench train --tune` has written.

    Args:
        path: the file's path.
        environ: the environment; its variables take precedence.
        local_size: ranks on a host.

    Returns:
        The further variables to set (none if the file is for another machine), and a line for the user about them.

    Raises:
        ConfigError: the file cannot be read, or sets other variables than it may.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        wanted, fits = dict(content["tuned"]), dict(content["fits"])
        if strange := [f"{name}={value!r}" for name, value in wanted.items() if not _may_be_set(name, value)]:
            raise ValueError(f"it sets {', '.join(strange)}; it may set {', '.join(TUNABLE)}, to numbers")
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule, received = "tuned settings are a file that hvdtrain bench train --tune wrote", f"{path}: {error!r}"
        raise ConfigError(rule, received, f"hvdtrain bench train --tune --out {path}", shared=True) from error
    here = machine_shape(local_size)
    others = [f"{it}: {fits.get(it)}, here {here.get(it)}" for it in here | fits if fits.get(it) != here.get(it)]
    if others:
        return {}, f"{path} is not used: it was tuned for something else ({'; '.join(others)})"
    found = {name: value for name, value in wanted.items() if name not in environ}
    changes = [f"{name}={value}" for name, value in found.items()] or ["nothing to set"]
    for name in wanted.keys() - found.keys():
        if environ[name] != wanted[name]:
            changes.append(f"{name}={environ[name]} stays as it is set (tuned: {wanted[name]})")
    return found, f"tuned by {path} under {content.get('launcher')}: {'; '.join(changes)}"


def _may_be_set(name: str, value: object) -> bool:
    number = isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", value)
    return bool(number and name in TUNABLE) or (name == variables.COMPRESSION and value in ("fp16", "none"))


def use_tuned(detected: Detected) -> None:
    """Sets the variables of the file in HVDTRAIN_TUNED, once, before an engine starts; raises as `tuned`."""
    if path := os.environ.pop(variables.TUNED, ""):
        found, text = tuned(path, os.environ, detected.local_size)
        os.environ.update(found)
        torch: Any = sys.modules.get("torch")  # which has read its number already
        if torch is not None and THREADS[0] in found:
            torch.set_num_threads(int(found[THREADS[0]]))
        if detected.rank == 0:
            print(f"hvdtrain: {text}", file=sys.stderr, flush=True)


def share_cores(detected: Detected) -> None:
    """Divides this machine's cores among its ranks by threads a rank; variables that are set stay."""
    use_tuned(detected)
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, detected.local_size))
    for variable in THREADS:
        os.environ.setdefault(variable, str(threads))
    # OpenMP's idle threads spin by default, on cores that Horovod's thread and other programs need too: on a busy
    # machine two threads of torch were 10 times slower than one, and 5 times faster again without spinning
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keras_modules(backend: str, detected: Detected) -> dict[str, str]:
    """Returns the modules that Keras on a backend needs, in import order, each with the command that installs it.

    Raises:
        ConfigError: a backend that hvdtrain has no adapter for.
    """
    if backend not in ("tensorflow", "torch"):
        remedy = "--backend tensorflow|torch, or KERAS_BACKEND"
        raise ConfigError("Keras needs the backend tensorflow or torch", backend, remedy, shared=True)
    install = install_command("keras", *(["torch"] if backend == "torch" else []), "build")
    needed = ["numpy", backend, "keras"]
    if detected.launcher != "none":
        needed.insert(1, "horovod")  # before the slow ones: a broken one is known at once
        needed.append(f"horovod.{backend}")
    return {name: build_horovod_command() if name.startswith("horovod") else install for name in needed}


def torch_modules(engine: str, detected: Detected, *, torchvision: bool = True) -> dict[str, str]:
    """Returns the modules that a PyTorch program needs under an engine, as `keras_modules`.

    Raises:
        LauncherError: this launcher cannot start that engine's ranks.
    """
    try:
        chosen = choose_engine(engine, detected, "torch")
    except HvdtrainError as error:
        error.shared = True  # the launcher gave every rank the same
        raise
    install = install_command("torch", "build")
    needed = dict.fromkeys(("numpy", "torch", *(["torchvision"] * torchvision)), install)
    if chosen == "horovod":
        needed |= dict.fromkeys(("horovod", "horovod.torch"), build_horovod_command())
    elif chosen == "deepspeed":
        needed["deepspeed"] = install_command("torch", "deepspeed")
    return needed


def find_modules(needed: Mapping[str, str]) -> None:
    """Raises LauncherError, with the commands to install them, for modules that are missing; takes milliseconds."""
    roots = dict.fromkeys(name.partition(".")[0] for name in needed)
    missing = [root for root in roots if importlib.util.find_spec(root) is None]
    if missing:
        commands = [command for name, command in needed.items() if name.partition(".")[0] in missing]
        raise LauncherError(
            f"every rank needs {', '.join(roots)}",
            f"no {', '.join(missing)} in {_this_python()}",
            # the frameworks first: Horovod is built for those it finds
            " && ".join(sorted(dict.fromkeys(commands), key=lambda command: "build-horovod" in command)),
        )


def import_modules(needed: Mapping[str, str]) -> None:
    """Imports modules, quietly; raises LauncherError, with the command that helps, for one that is broken.

    It turns Python's collector off during the imports, and excludes their objects later: half a million that are no
    garbage (TensorFlow and Keras: 2.1 s of CPU time instead of 3.3, torch 1.4 instead of 2.0).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with quiet():
            for name, command in needed.items():
                if name == "deepspeed":  # its engine imports it, after telling it which accelerator to use
                    continue
                try:
                    importlib.import_module(name)
                except ImportError as error:
                    raise LauncherError(f"{name} must load in {_this_python()}", str(error), command) from error
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def load_triton_apart() -> None:
    """Loads PyTorch's Triton, if TensorFlow is also imported, so that it uses its own LLVM.

    TensorFlow opens its libraries for the whole process (RTLD_GLOBAL), with an LLVM of another version in them. Some
    14,000 functions of Triton's library would resolve to TensorFlow's, and `torch.compile` would end in a segmentation
    fault. If Triton is loaded first, or looks in itself first as here, both use their own functions.
    """
    if not {"tensorflow", "torch"} <= set(sys.modules) or "triton" in sys.modules:
        return
    if importlib.util.find_spec("triton") is None:  # PyTorch's builds for CPUs come without
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("triton")
    finally:
        sys.setdlopenflags(flags)


def _this_python() -> str:
    return f"{sys.executable} (Python {sys.version.split()[0]}) on {socket.gethostname()}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps TensorFlow's C++ notes off the terminal, unless TF_CPP_MIN_LOG_LEVEL asks for them.

    While it loads, TensorFlow writes to file descriptor 2 before any log level counts. That goes to a file,
    which is shown if loading fails.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors
    with tempfile.TemporaryFile() as notes:
        try:
            with stderr_to(notes):
                yield
        except BaseException:
            notes.seek(0)
            sys.stderr.write(notes.read().decode(errors="replace"))
            raise


@contextlib.contextmanager
def stderr_to(file: IO[bytes]) -> Iterator[None]:
    """A context in which all output to file descriptor 2, also from C++, goes to `file`."""
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
