# ruff: noqa: UP021 - this file also runs under Python 3.6, which does not know text=
"""The probe: gathers a host's facts as plain data. Sent over ssh as text: only the standard library, only ASCII.

It runs under any Python that the host has (3.6 and newer), because a host with the wrong one must still report it.
It imports nothing that takes seconds: it reads versions from files. It gathers every fact in a separate thread with a
time limit, because a dead file server or driver never answers.
"""

import ctypes
import fcntl
import glob
import hashlib
import importlib.util
import json
import mmap
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

FACT_LIMIT_S = 3.0
PACKAGES = (
    "hvdtrain", "horovod", "torch", "torchvision", "tensorflow", "tensorflow-cpu", "keras", "numpy", "deepspeed",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
# names of C++ classes that a Horovod extension contains if it was built with them
BUILT_WITH = {
    "mpi": b"N7horovod6common13MPIControllerE",
    "gloo": b"N7horovod6common14GlooControllerE",
    "nccl": b"N7horovod6common13NCCLAllreduceE",
}
EXTENSIONS = {"torch": "torch/mpi_lib_v2*.so", "tensorflow": "tensorflow/mpi_lib*.so"}
VARIABLES = re.compile(
    r"^(HOROVOD_|NCCL_|GLOO_|OMPI_MCA_|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_ORDER$|OMP_NUM_THREADS$|KERAS_BACKEND$)"
)
# a variable whose name holds one of these is shown to nobody, and passed to ranks only when it is asked for
SECRET = re.compile(
    r"KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|_PWD$|_PAT$|_DSN$|_AUTH$", re.IGNORECASE
)


def _system() -> "dict[str, Any]":
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return {
        "hostname": socket.gethostname(), "kernel": platform.release(), "machine": platform.machine(),
        "os": _text("/etc/os-release", r'(?m)^PRETTY_NAME="?([^"\n]*)') or platform.system(),
        "uid": os.getuid(), "boot_id": boot_id,
    }  # fmt: skip


def _python() -> "dict[str, str]":
    return {
        "executable": sys.executable, "version": platform.python_version(), "prefix": sys.prefix,
        "implementation": platform.python_implementation(), "suffix": sysconfig.get_config_var("EXT_SUFFIX") or "",
    }  # fmt: skip


def _packages() -> "dict[str, str]":
    """Versions by package, from the names of the metadata folders: the first on the path counts, as for import."""
    pattern = re.compile(r"^(.+?)-([^-]+?)(?:-py[\d.]+)?\.(?:dist-info|egg-info)$")
    found: dict[str, str] = {}
    also = {"hvdtrain-horovod": "horovod"}  # the same module, as a ready wheel
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for match in filter(None, map(pattern.match, names)):
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
            name = also.get(name, name)
            if name in PACKAGES:
                found.setdefault(name, match.group(2))
    for name in ("hvdtrain", "horovod", "torch"):
        if package_folder(name) is None:
            found.pop(name, None)  # metadata of what is gone
    code = package_folder("hvdtrain")
    if code:  # a checkout on PYTHONPATH has no metadata
        found["hvdtrain"] = _text(os.path.join(code, "core", "version.py"), r'__version__ = "([^"]+)"') or "unknown"
    torch = package_folder("torch")
    if torch:  # with the build: 2.12.1+cu130
        version = _text(os.path.join(torch, "version.py"), r"__version__(?:: \w+)? = '([^']+)'")
        found["torch"] = version or found.get("torch", "unknown")
    return found


def package_folder(name: str) -> "str | None":
    """Returns the folder that a package would be imported from; None if it is not installed. Imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    # a folder without __init__.py has no origin: the leftovers of a package are none
    return os.path.dirname(spec.origin) if spec and spec.origin and spec.submodule_search_locations else None


def _text(path: str, pattern: str) -> "str | None":
    try:
        with open(path, errors="replace") as file:
            found = re.search(pattern, file.read())
    except OSError:
        return None
    return found.group(1) if found else None


def _code() -> "dict[str, str] | None":
    """A digest of hvdtrain's own sources: the same version can be another checkout."""
    folder = package_folder("hvdtrain")
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(folder, "**", "*.py"), recursive=True)):
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, folder).encode() + b"\0" + file.read() + b"\0")
    return {"folder": folder, "sha256": digest.hexdigest()}


def _horovod() -> "dict[str, Any] | None":
    folder = package_folder("horovod")
    if folder is None:
        return None
    try:
        with open(os.path.join(folder, "metadata.json")) as file:
            built_for = json.load(file)
    except (OSError, ValueError):
        built_for = {}
    extensions = {}
    for framework, pattern in EXTENSIONS.items():
        files = sorted(glob.glob(os.path.join(folder, pattern)))
        mine = [name for name in files if name.endswith(sysconfig.get_config_var("EXT_SUFFIX") or ".so")]
        if files:
            extensions[framework] = dict(extension_facts((mine or files)[0]), for_this_python=bool(mine))
    return {
        "folder": folder,
        "extensions": extensions,
        "built_for": {"torch": built_for.get("pytorch"), "tensorflow": built_for.get("tensorflow")},
    }


def extension_facts(path: str) -> "dict[str, Any]":
    """Returns what a Horovod extension was built with, and which of its libraries this host lacks.

    Does not load the file: it contains the names of its C++ classes, of its libraries and of their folders as text.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        built = {name: data.find(symbol) >= 0 for name, symbol in BUILT_WITH.items()}
        needed = [_word(data, b"\0" + name) for name in (b"libmpi.so.", b"libnccl.so.", b"libcudart.so.")]
        rpath = _word(data, b"\0$ORIGIN")
    folders = [folder.replace("$ORIGIN", os.path.dirname(path)) for folder in (rpath or "").split(":") if folder]
    found = [name for name in needed if name]
    return dict(built, needs=found, missing=[name for name in found if not _loadable(name, folders)])


def _word(data: mmap.mmap, start: bytes) -> "str | None":
    at = data.find(start)
    return data[at + 1 : data.find(b"\0", at + 1)].decode("ascii", "replace") if at >= 0 else None


def _loadable(name: str, folders: "list[str]") -> bool:
    if any(os.path.exists(os.path.join(folder, name)) for folder in folders):
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _torch() -> "dict[str, str | None] | None":
    folder = package_folder("torch")
    if folder is None:
        return None
    path = os.path.join(folder, "version.py")
    return {"cuda": _text(path, r"cuda(?:: [\w\[\] |]+)? = '([^']+)'"), "hip": _text(path, r"hip(?:: .*)? = '([^']+)'")}


def _output(command: "list[str]", limit_s: float = FACT_LIMIT_S) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=limit_s)  # fmt: skip
    return done.stdout


def gpu_count() -> int:
    """Devices that this process may use, without asking the driver's tools: for the quick checks."""
    nodes = [name for name in os.listdir("/dev") if re.match(r"^nvidia\d+$", name)]
    return visible(len(nodes), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(count: int, mask: "str | None") -> int:
    """Returns how many of `count` devices a CUDA_VISIBLE_DEVICES leaves."""
    if mask is None:
        return count
    chosen = []
    for name in (part.strip() for part in mask.split(",")):
        if not name or name == "-1" or (name.isdigit() and int(name) >= count):
            break  # CUDA ignores everything from the first name on that it does not know
        chosen.append(name)
    return min(count, len(chosen))


def _gpus() -> "dict[str, Any]":
    """Returns the GPUs that nvidia-smi lists, and the number of NVIDIA cards on the PCI bus, listed or not."""
    cards = 0
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        vendor, kind = (_text(os.path.join(folder, name), r"(\w+)") for name in ("vendor", "class"))
        cards += vendor == "0x10de" and (kind or "").startswith(("0x0300", "0x0302"))
    devices, driver, errors = [], None, []
    tool = shutil.which("nvidia-smi")
    command = ["--query-gpu=driver_version,memory.total,memory.used,name", "--format=csv,noheader,nounits"]
    text = _output([tool] + command) if tool else ""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",", 3)]
        if len(parts) < 4 or not parts[1].isdigit():
            errors.append(line.strip()[:200])
            continue
        used = int(parts[2]) << 20 if parts[2].isdigit() else 0
        devices.append({"name": parts[3], "memory_bytes": int(parts[1]) << 20, "used_bytes": used})
        driver = parts[0]
    return {"cards": cards, "devices": devices, "driver": driver, "error": "; ".join(errors) or None}


def _cores() -> "dict[str, Any]":
    return {"usable": len(os.sched_getaffinity(0)), "quota": _quota(), "load": os.getloadavg()[0]}


def _quota() -> "float | None":
    """Cores that the control group (version 2, or 1) leaves; None: no limit."""
    limit = _text("/sys/fs/cgroup/cpu.max", r"(\S+ \d+)")
    if limit is None:
        folder = "/sys/fs/cgroup/cpu/cpu.cfs_"
        limit = "{} {}".format(*(_text(folder + name, r"(-?\d+)") for name in ("quota_us", "period_us")))
    quota, period = limit.split()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def memory() -> "dict[str, int]":
    """Returns the bytes of main memory: "MemTotal", and "MemAvailable" if the kernel reports it."""
    with open("/proc/meminfo") as file:
        text = file.read()
    kib = {name: re.search(rf"(?m)^{name}:\s+(\d+)", text) for name in ("MemTotal", "MemAvailable")}
    return {name: int(match.group(1)) << 10 for name, match in kib.items() if match}


def interfaces() -> "list[dict[str, Any]]":
    """Returns all IPv4 addresses: [{"name", "address", "prefix", "up"}] (SIOCGIFCONF: `ip` may be missing)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        buffer = ctypes.create_string_buffer(40 << 14)
        packed = fcntl.ioctl(sock, 0x8912, struct.pack("iL", len(buffer), ctypes.addressof(buffer)))
        entries, found = buffer.raw[: struct.unpack("iL", packed)[0]], []
        for start in range(0, len(entries), 40):
            # name and address: the further addresses of an interface, also those of an alias (eth0:1), have own masks
            entry = entries[start : start + 40]
            try:
                mask = struct.unpack("!I", fcntl.ioctl(sock, 0x891B, entry)[20:24])[0]
                flags = struct.unpack("h", fcntl.ioctl(sock, 0x8913, entry)[16:18])[0]
            except OSError:
                continue  # it is gone since
            found.append({
                "name": entry[:16].split(b"\0")[0].split(b":")[0].decode(), "address": socket.inet_ntoa(entry[20:24]),
                "prefix": bin(mask).count("1"), "up": bool(flags & 0x41 == 0x41),
            })  # fmt: skip
        return found


def _folder(path: str) -> "dict[str, Any]":
    """Room in the file system that holds `path` or would hold it."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    room = os.statvfs(path)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return {
        "nearest": path,
        "total_bytes": total,
        "free_bytes": free,
        "free_inodes": room.f_favail if room.f_files else -1,
    }


def _temporary() -> "dict[str, Any]":
    """The folder for temporary files; Python itself tries to write to it, and to others if it cannot."""
    wanted = os.environ.get("TMPDIR") or "/tmp"
    try:
        usable = tempfile.gettempdir()
    except OSError as error:
        return dict(_folder(wanted), path=wanted, error=str(error))
    return dict(_folder(wanted), path=wanted, error=None if usable == wanted else "not writable")


def _variables() -> "dict[str, str]":
    kept = {name: value for name, value in os.environ.items() if VARIABLES.match(name) and not SECRET.search(name)}
    return {name: value[:200] for name, value in sorted(kept.items())}


def reached() -> "str | None":
    """Returns this host's IPv4 address that the ssh connection came to; None without ssh, or through IPv6."""
    # "client's address, its port, server's address, its port": sshd sets it
    parts = os.environ.get("SSH_CONNECTION", "").split()
    address = parts[2].rpartition(":")[2] if len(parts) == 4 else ""  # ::ffff:10.0.0.2 is 10.0.0.2
    try:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, address))
    except OSError:
        return None


QUICK: "dict[str, Callable[[], Any]]" = {
    "system": _system, "python": _python, "packages": _packages, "code": _code, "horovod": _horovod,
    "gpu_count": gpu_count, "cores": _cores, "interfaces": interfaces, "reached": reached,
}  # fmt: skip
THOROUGH: "dict[str, Callable[[], Any]]" = {
    "torch": _torch, "gpus": _gpus, "memory": memory, "temporary": _temporary, "variables": _variables,
}  # fmt: skip


def facts(request: "dict[str, Any]") -> "dict[str, Any]":
    """Everything asked for: {fact: value}, or {fact: {"unanswered": why}} where that failed or took too long."""
    sys.path[:0] = [folder for folder in request.get("paths", []) if folder not in sys.path]
    cwd = request.get("cwd")
    questions = dict(QUICK) if request.get("fast") else dict(QUICK, **THOROUGH)
    questions["cwd"] = lambda: {"path": cwd, "exists": cwd is None or os.path.isdir(cwd)}
    if not request.get("fast"):
        questions["shared_memory"] = lambda: _folder(request.get("shared_memory", "/dev/shm"))
        questions["run_dir"] = lambda: dict(_folder(request["run_dir"]), path=request["run_dir"])
    return ask(questions, request.get("limit_s", FACT_LIMIT_S))


def ask(questions: "dict[str, Callable[[], Any]]", limit_s: float) -> "dict[str, Any]":
    """Calls each function in a separate thread; gives up an answer that takes longer than `limit_s`."""
    answers: dict[str, Any] = {name: {"unanswered": f"no answer in {limit_s:g} s"} for name in questions}

    def answer(name: str, question: "Callable[[], Any]") -> None:
        try:
            answers[name] = question()
        except Exception as error:  # whatever a host's files or drivers do: the other facts still count
            answers[name] = {"unanswered": f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in questions.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    return dict(answers)
