"""GPUs, cores, memory, disks and limits of every host against the ranks it is to run."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.cluster.doctor.findings import (
    FULL_BYTES,
    GIB,
    MIB,
    ClusterFacts,
    Facts,
    Finding,
    Severity,
    bytes_text,
    known,
    odd_ones,
)
from hvdtrain.horovod_build.environment import NCCL_OF_TENSORFLOW
from hvdtrain.horovod_build.support import CUDA_FOR_TENSORFLOW

# the oldest driver that runs programs of a CUDA version (NVIDIA, "CUDA Compatibility", minor version compatibility)
_DRIVERS = {13: 580, 12: 525, 11: 450}
# NCCL maps about 10 MiB for each pair of ranks of a host; loaders of data hand batches over in it; Docker gives 64 MiB
_SHARED_BYTES, _SHARED_PER_RANK_BYTES, _SHARED_LEAST_BYTES = 64 * MIB, 64 * MIB, 8 * MIB
_MEMORY_PER_RANK_BYTES = GIB  # a framework alone takes half of it
_ROOM_BYTES = GIB
_TEMPORARY_BYTES, _TEMPORARY_LEAST_BYTES = 256 * MIB, 16 * MIB
_GPU_USED_SHARE = 0.1


def quick(cluster: ClusterFacts) -> Iterator[Finding]:
    """Checks each host before a job starts: GPUs for its slots, and the working directory."""
    for host, facts in cluster.facts.items():
        yield from _gpu_slots(host, facts, cluster.ranks[host])
        yield from _folder(cluster, host, facts)


def thorough(cluster: ClusterFacts) -> Iterator[Finding]:
    """The rest."""
    for host, facts in cluster.facts.items():
        for check in (_unanswered, _gpus, _core_slots, _memory, _disks):
            yield from check(cluster, host, facts)
    yield from _same_machines(cluster)


def _gpu_slots(host: str, facts: Facts, ranks: int) -> Iterator[Finding]:
    gpus = known(facts, "gpu_count")
    if gpus and ranks > gpus:
        yield Finding(
            "slots-over-gpus", "error", (host,), f"{ranks} ranks for {gpus} GPU(s)",
            "every rank drives a GPU of its own; ranks that share one run out of its memory, and NCCL refuses them",
            f"-H ...,{host}:{gpus}",
        )  # fmt: skip


def _core_slots(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    cores, ranks = known(facts, "cores"), cluster.ranks[host]
    if cores is None:
        return
    usable = min(cores["usable"], cores["quota"] or cores["usable"])
    if ranks > usable:
        limit = " (its control group's limit)" if usable < cores["usable"] else ""
        yield Finding(
            "slots-over-cores", "warning", (host,), f"{ranks} ranks for {usable:g} core(s){limit}",
            "ranks that take turns on a core make every all-reduce wait for the slowest",
            f"-H ...,{host}:{max(1, int(usable))}",
        )  # fmt: skip


def _folder(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    cwd = known(facts, "cwd")
    if cwd is not None and not cwd["exists"]:
        yield Finding(
            "no-folder", "error", (host,), f"no folder {cwd['path']} there",
            "ranks start in the folder that the launcher was called in, and find the program there",
            f"copy it: {cluster.on(host, 'mkdir', '-p', cwd['path'])} && rsync -a {cwd['path']}/ {host}:{cwd['path']}/",
        )  # fmt: skip


def _unanswered(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    asked = {"run_dir": "df {}", "temporary": "df /tmp", "gpus": "nvidia-smi", "shared_memory": "df /dev/shm"}
    for fact, value in facts.items():
        if isinstance(value, dict) and "unanswered" in value:
            command = asked.get(fact, "dmesg | tail").replace("{}", facts.get("run_dir", {}).get("path", ""))
            yield Finding(
                "unanswered", "warning", (host,), f"{fact.replace('_', ' ')}: {value['unanswered']}",
                "what hangs or fails here, a dead file server or driver, stops ranks there as well",
                f"there: {command.strip()}",
            )  # fmt: skip


def _gpus(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    gpus = known(facts, "gpus")
    if gpus is None:
        return
    count = len(gpus["devices"])
    if not count and gpus["cards"]:
        reason = gpus["error"] or "nvidia-smi is not there"
        yield Finding(
            "no-gpu-driver", "warning", (host,), f"{gpus['cards']} NVIDIA card(s), but no driver answers: {reason}",
            "ranks would train on its processor",
            "install the driver and reboot; in a container: docker run --gpus all",
        )  # fmt: skip
    if count and not known(facts, "gpu_count"):
        mask = (known(facts, "variables") or {}).get("CUDA_VISIBLE_DEVICES")
        yield Finding(
            "gpus-hidden", "warning", (host,), f"{count} GPU(s), none usable: CUDA_VISIBLE_DEVICES={mask!r}",
            "ranks would train on its processor", "unset CUDA_VISIBLE_DEVICES in the shell's start-up files there",
        )  # fmt: skip
    if not count:
        return
    extensions = (known(facts, "horovod") or {}).get("extensions") or {}
    framework, cuda = _computes(facts, extensions)
    yield from _driver(host, gpus, framework, cuda)
    yield from _nccl(cluster, host, facts, extensions.get(framework), cuda)
    for number, device in enumerate(gpus["devices"]):
        if device["used_bytes"] > _GPU_USED_SHARE * device["memory_bytes"]:
            used, total = bytes_text(device["used_bytes"]), bytes_text(device["memory_bytes"])
            yield Finding(
                "gpu-in-use", "warning", (host,), f"GPU {number} ({device['name']}): {used} of {total} in use",
                "another job runs there: this one would be slow, or run out of memory",
                f"{cluster.on(host, 'nvidia-smi')} shows whose",
            )  # fmt: skip


def _computes(facts: Facts, extensions: Facts) -> tuple[str, str | None]:
    """The framework that is there for GPUs, and the newest CUDA in its ranks; None: a build for CPUs."""
    packages = known(facts, "packages") or {}
    if "torch" in packages or not {"tensorflow", NCCL_OF_TENSORFLOW} <= set(packages):
        return "torch", (known(facts, "torch") or {}).get("cuda")
    with_nccl = extensions.get("tensorflow", {}).get("nccl")
    return "tensorflow", CUDA_FOR_TENSORFLOW if with_nccl else "12"  # its own


def _driver(host: str, gpus: Facts, framework: str, cuda: str | None) -> Iterator[Finding]:
    if not cuda or not gpus["driver"]:
        return
    least = _DRIVERS.get(int(cuda.partition(".")[0]))
    major = gpus["driver"].partition(".")[0]
    if least and major.isdigit() and int(major) < least:
        built = "PyTorch is" if framework == "torch" else "what TensorFlow's ranks load is"
        yield Finding(
            "driver-too-old", "error", (host,), f"driver {gpus['driver']}, {built} built for CUDA {cuda}",
            f"CUDA {cuda.partition('.')[0]} needs driver {least} or newer", "install a newer driver there, and reboot",
        )  # fmt: skip


def _nccl(
    cluster: ClusterFacts, host: str, facts: Facts, extension: Facts | None, cuda: str | None
) -> Iterator[Finding]:
    if known(facts, "torch") is not None and not cuda:
        yield Finding(
            "torch-without-cuda", "warning", (host,), "GPUs are there, but PyTorch is a build without CUDA",
            "ranks would train on its processor",
            cluster.on(host, cluster.python_on(host), "-m", "pip", "install", "--upgrade", "torch"),
        )  # fmt: skip
    if cuda and extension is not None and not extension["nccl"]:
        yield Finding(
            "horovod-without-nccl", "warning", (host,), "GPUs are there, but Horovod was built without NCCL",
            "every gradient goes through the processors' memory: several times slower",
            cluster.build_on(host, "--gpu", "nccl"),
        )  # fmt: skip


def _same_machines(cluster: ClusterFacts) -> Iterator[Finding]:
    """A synchronous job runs at the pace of its slowest host."""
    kinds = {
        host: ", ".join(sorted({device["name"] for device in gpus["devices"]})) or "none"
        for host, gpus in cluster.of("gpus").items()
    }
    usual, others = odd_ones(kinds)
    if others:
        kinds_there = ", ".join(f"{host}: {kind}" for host, kind in others.items())
        yield Finding(
            "gpus-differ", "warning", tuple(others), f"GPUs differ: {kinds_there}; elsewhere: {usual}",
            "all ranks wait for the slowest in every step", "leave them out, or give each host a job of its own",
        )  # fmt: skip


def _memory(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    memory, shared, ranks = known(facts, "memory"), known(facts, "shared_memory"), cluster.ranks[host]
    if memory and memory.get("MemAvailable", ranks * GIB) < ranks * _MEMORY_PER_RANK_BYTES:
        available = bytes_text(memory["MemAvailable"])
        yield Finding(
            "little-memory", "warning", (host,), f"{available} of memory free for {ranks} rank(s)",
            "the kernel kills a rank when it runs out, and the job with it",
            f"end what is not needed: {cluster.on(host, 'ps', 'aux', '--sort=-rss')}",
        )  # fmt: skip
    need = _SHARED_BYTES + ranks * _SHARED_PER_RANK_BYTES
    if shared and shared["free_bytes"] < need:
        severe = shared["free_bytes"] < _SHARED_LEAST_BYTES * (ranks + 1)
        total, free = bytes_text(shared["total_bytes"]), bytes_text(shared["free_bytes"])
        yield Finding(
            "small-shared-memory", "error" if severe else "warning", (host,),
            f"/dev/shm: {free} free of {total}, wanted are {bytes_text(need)} for {ranks} rank(s)",
            "NCCL, Open MPI and loaders of data pass data between processes in it: ranks die with a bus error",
            f"{cluster.on(host, 'mount', '-o', 'remount,size=8G', '/dev/shm')}; in a container: docker run --shm-size"
            " 8g (or --ipc=host); what fills it: ls -l /dev/shm",
        )  # fmt: skip


def _disks(cluster: ClusterFacts, host: str, facts: Facts) -> Iterator[Finding]:
    temporary, run_dir = known(facts, "temporary"), known(facts, "run_dir")
    if temporary is not None:
        why = "Open MPI, Python's processes and downloads need it: ranks do not start, or die"
        needed = _TEMPORARY_BYTES, _TEMPORARY_LEAST_BYTES
        yield from _room(cluster, host, "temporary folder", temporary, *needed, why)
        if temporary["error"] and temporary["free_bytes"] >= _TEMPORARY_LEAST_BYTES:
            yield Finding(
                "temporary-folder", "error", (host,), f"{temporary['path']} cannot be used: {temporary['error']}",
                "Open MPI, Python's processes and downloads need it",
                f"{cluster.on(host, 'mount', '-o', 'remount,rw', temporary['nearest'])}, or set TMPDIR there",
            )  # fmt: skip
    if run_dir is not None:
        why = "a checkpoint that does not fit ends the job"
        yield from _room(cluster, host, "run directory", run_dir, _ROOM_BYTES, FULL_BYTES, why)


def _room(
    cluster: ClusterFacts, host: str, name: str, room: Facts, wanted: int, least: int, why: str
) -> Iterator[Finding]:
    free, inodes = room["free_bytes"], room["free_inodes"]
    if free >= wanted and not 0 <= inodes < 100:
        return
    severity: Severity = "error" if free < least or 0 <= inodes < 100 else "warning"
    left = f"{bytes_text(free)} free of {bytes_text(room['total_bytes'])}" if free < wanted else f"{inodes} files left"
    yield Finding(
        "full-disk", severity, (host,), f"the {name} {room['path']} (in {room['nearest']}): {left}", why,
        f"remove what is not needed: {cluster.on(host, 'du', '-xhd1', room['nearest'])}",
    )  # fmt: skip
