"""The doctor's checks on what hosts said (recorded facts, one of them changed), and how findings are told."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hvdtrain.cluster.doctor import examine, findings, machine, software
from hvdtrain.cluster.doctor import network as checks_network
from hvdtrain.cluster.doctor.findings import ClusterFacts, Finding
from hvdtrain.cluster.doctor.network import Links, RunFolder
from hvdtrain.cluster.hosts.addresses import Chosen
from hvdtrain.core.errors import ConfigError

GIB = 1 << 30
ROOM = {"nearest": "/data", "total_bytes": 900 * GIB, "free_bytes": 500 * GIB, "free_inodes": 10**7}
EXTENSION = {"mpi": True, "gloo": True, "nccl": True, "needs": ["libmpi.so.40"], "missing": [], "for_this_python": True}
GPU = {"name": "NVIDIA H100", "memory_bytes": 80 * GIB, "used_bytes": 0}
# what a host with 4 GPUs said, shortened
HOST: dict[str, Any] = {
    "system": {"hostname": "host", "boot_id": "b", "machine": "x86_64", "uid": 1000},
    "python": {"executable": "/opt/v/bin/python", "version": "3.11.7", "suffix": ".cpython-311-x86_64-linux-gnu.so"},
    "packages": {"hvdtrain": "0.1.0", "horovod": "0.28.1", "torch": "2.12.1+cu130", "tensorflow-cpu": "2.21.0",
                 "keras": "3.15.1", "numpy": "2.4.6", "nvidia-nccl-cu13": "2.29.7"},
    "code": {"folder": "/opt/v/hvdtrain", "sha256": "aa"},
    "horovod": {"folder": "/opt/v/horovod", "built_for": {"torch": "2.12.1+cu130", "tensorflow": "2.21.0"},
                "extensions": {"torch": EXTENSION, "tensorflow": EXTENSION | {"nccl": False}}},
    "gpu_count": 4,
    "gpus": {"cards": 4, "driver": "580.95", "error": None,
             "devices": [GPU] * 4},
    "torch": {"cuda": "13.0", "hip": None},
    "cores": {"usable": 32, "quota": None, "load": 0.1},
    "memory": {"MemTotal": 512 * GIB, "MemAvailable": 500 * GIB},
    "shared_memory": {"nearest": "/dev/shm", "total_bytes": 256 * GIB, "free_bytes": 256 * GIB, "free_inodes": -1},
    "temporary": ROOM | {"path": "/tmp", "nearest": "/tmp", "error": None},
    "run_dir": ROOM | {"path": "/data/runs"},
    "cwd": {"path": "/data", "exists": True},
    "variables": {}, "reached": "10.0.0.1",
    "interfaces": [{"name": "lo", "address": "127.0.0.1", "prefix": 8, "up": True},
                   {"name": "eth0", "address": "10.0.0.1", "prefix": 24, "up": True}],
    "local": False,
}  # fmt: skip


def host(number: int = 1, /, **changes: Any) -> dict[str, Any]:
    """A healthy host's facts, some of them changed; "a__b=value" changes b within a."""
    facts = copy.deepcopy(HOST)
    facts["system"] |= {"hostname": f"host{number}", "boot_id": f"boot{number}"}
    facts["interfaces"][1]["address"] = f"10.0.0.{number}"
    for path, value in changes.items():
        *folders, last = path.split("__")
        place = facts
        for name in folders:
            place = place[name]
        place[last] = value
    return facts


def cluster(*hosts: dict[str, Any], ranks: int = 4) -> ClusterFacts:
    named = {f"host{number}": facts for number, facts in enumerate(hosts, 1)}
    return ClusterFacts(named, dict.fromkeys(named, ranks), "/opt/v/bin/python")


def everything(known: ClusterFacts) -> list[Finding]:
    modules = (checks_network.distinct, software.quick, machine.quick, machine.thorough)
    return [finding for check in modules for finding in check(known)]


def named(found: list[Finding]) -> dict[str, tuple[str, ...]]:
    return {finding.id: finding.hosts for finding in found}


# -- what hosts are -------------------------------------------------------------------------------------------
def test_healthy_hosts_have_nothing_to_say() -> None:
    assert everything(cluster(host(1), host(2), host(3))) == []


def test_a_ready_wheel_is_horovod_and_fits_every_mending_release() -> None:
    ready = {"packages__horovod": "0.28.1+torch2.12cu130.tf2.21", "horovod__built_for__torch": "2.12.0+cu130"}
    assert everything(cluster(host(1), host(2, **ready), host(3))) == []
    # the twins: another release, another build, another Horovod
    for changes, id_ in (
        ({"horovod__built_for__torch": "2.11.0+cu130"}, "horovod-other-torch"),
        ({"horovod__built_for__torch": "2.12.1+cpu"}, "horovod-other-torch"),
        ({"packages__horovod": "0.28.0+torch2.12cu130.tf2.21"}, "horovod-differs"),
    ):
        assert named(everything(cluster(host(1), host(2, **(ready | changes)), host(3)))) == {id_: ("host2",)}


def test_gpus_for_tensorflow_alone() -> None:
    """Horovod's extension has CUDA 13 in it, whose driver must be newer than the one that TensorFlow asks for."""
    packages = {name: version for name, version in HOST["packages"].items() if not name.startswith(("torch", "nvidia"))}
    del packages["tensorflow-cpu"]
    packages |= {"tensorflow": "2.21.0", "nvidia-nccl-cu12": "2.32.3"}
    alone = {"torch": None, "packages": packages, "horovod__extensions": {"tensorflow": EXTENSION}}
    without = alone | {"horovod__extensions": {"tensorflow": EXTENSION | {"nccl": False}}}
    for changes, driver, ids in (
        (alone, "580.95", []), (alone, "570.1", ["driver-too-old"]), (without, "570.1", ["horovod-without-nccl"]),
        (without, "470.1", ["driver-too-old", "horovod-without-nccl"]),
    ):  # fmt: skip
        found = everything(cluster(host(1, **changes, gpus__driver=driver)))
        assert [finding.id for finding in found] == ids, (driver, found)


OTHER_GPU = [GPU | {"name": "NVIDIA A10", "memory_bytes": 24 * GIB}] * 4


@pytest.mark.parametrize(
    ("id_", "severity", "fix", "changes"),
    [
        ("slots-over-gpus", "error", "host2:2", {"gpu_count": 2}),
        ("slots-over-cores", "warning", "host2:2", {"cores__usable": 2}),
        ("slots-over-cores", "warning", "host2:3", {"cores__quota": 3.0}),
        ("driver-too-old", "error", "newer driver", {"gpus__driver": "535.104"}),
        ("gpus-hidden", "warning", "unset CUDA_VISIBLE_DEVICES",
         {"gpu_count": 0, "variables": {"CUDA_VISIBLE_DEVICES": ""}}),
        ("gpu-in-use", "warning", "nvidia-smi", {"gpus__devices": [GPU | {"used_bytes": 9 * GIB}]}),
        ("gpus-differ", "warning", "leave them out", {"gpus__devices": OTHER_GPU}),
        ("torch-without-cuda", "warning", "pip install --upgrade torch", {"torch__cuda": None}),
        ("horovod-without-nccl", "warning", "--gpu nccl", {"horovod__extensions__torch": EXTENSION | {"nccl": False}}),
        ("horovod-library-missing", "error", "nvidia-nccl-cu13",
         {"horovod__extensions__torch": EXTENSION | {"missing": ["libnccl.so.2"]}}),
        ("horovod-other-python", "error", "build-horovod --install",
         {"horovod__extensions__torch": EXTENSION | {"for_this_python": False}}),
        ("horovod-other-tensorflow", "error", "build-horovod", {"horovod__built_for__tensorflow": "2.20.0"}),
        ("horovod-without-tensorflow", "warning", "build-horovod", {"horovod__extensions": {"torch": EXTENSION}}),
        ("keras-differs", "error", "pip install keras==3.15.1", {"packages__keras": "3.14.0"}),
        ("numpy-differs", "error", "numpy==2.4.6", {"packages__numpy": "1.26.4"}),
        ("hvdtrain-differs", "error", "hvdtrain==0.1.0", {"packages__hvdtrain": "0.0.9"}),
        ("hvdtrain-differs", "error", "rsync -a --delete /opt/v/hvdtrain/ host2:/opt/v/hvdtrain/",
         {"code__sha256": "bb"}),
        ("little-memory", "warning", "ps aux", {"memory__MemAvailable": 2 * GIB}),
        ("small-shared-memory", "warning", "--shm-size", {"shared_memory__free_bytes": 64 << 20}),
        ("small-shared-memory", "error", "--shm-size", {"shared_memory__free_bytes": 8 << 20}),
        ("temporary-folder", "error", "TMPDIR", {"temporary__error": "not writable"}),
        ("full-disk", "warning", "du -xhd1 /data", {"run_dir__free_bytes": GIB // 2}),
        ("full-disk", "error", "du -xhd1 /data", {"run_dir__free_inodes": 3}),
        ("no-folder", "error", "mkdir -p /data", {"cwd__exists": False}),
        ("unanswered", "warning", "df /data/runs",
         {"run_dir": {"unanswered": "no answer in 3 s", "path": "/data/runs"}}),
    ],
)  # fmt: skip
def test_one_thing_wrong(id_: str, severity: str, fix: str, changes: dict[str, Any]) -> None:
    found = everything(cluster(host(1), host(2, **changes), host(3)))
    assert named(found) == {id_: ("host2",)}
    assert found[0].severity == severity
    assert fix in found[0].fix and found[0].why


def test_horovod_without_gloo_or_mpi_anywhere() -> None:
    """Without MPI on all hosts is a choice; without Gloo nothing starts."""
    bare = dict.fromkeys(("torch", "tensorflow"), EXTENSION | {"mpi": False, "gloo": False})
    found = everything(cluster(host(1, horovod__extensions=bare), host(2, horovod__extensions=bare)))
    assert {finding.id: finding.severity for finding in found} == {
        "horovod-without-gloo": "error", "horovod-without-mpi": "note",
    }  # fmt: skip


def test_horovod_with_mpi_alone_is_taken() -> None:
    """As conda-forge builds it: mpirun starts ranks there; one host of several that has no MPI either is an error."""
    alone = dict.fromkeys(("torch", "tensorflow"), EXTENSION | {"mpi": True, "gloo": False})
    (found,) = everything(cluster(host(1, horovod__extensions=alone), host(2, horovod__extensions=alone)))
    assert (found.id, found.severity) == ("horovod-without-gloo", "warning") and "mpirun" in found.why
    bare = dict.fromkeys(("torch", "tensorflow"), EXTENSION | {"mpi": False, "gloo": False})
    found_of_both = everything(cluster(host(1, horovod__extensions=alone), host(2, horovod__extensions=bare)))
    assert ("horovod-without-gloo", "error") in {(its.id, its.severity) for its in found_of_both}


def test_facts_that_could_not_be_told_are_not_judged() -> None:
    """Each fact alone may be missing: told once, never an exception."""
    for fact in set(HOST) - {"local", "system", "interfaces"}:
        found = everything(cluster(host(1), host(2, **{fact: {"unanswered": "no answer in 3 s"}})))
        assert named(found).get("unanswered") == ("host2",), fact


def test_names() -> None:
    twins = cluster(host(1), host(2, system__hostname="host1"), host(3))
    assert named(everything(twins)) == {"duplicate-names": ("host1", "host2")}
    triplets = cluster(host(1), host(2, system__hostname="host1"), host(3, system__hostname="host1"))
    [fix] = [finding.fix for finding in everything(triplets) if finding.id == "duplicate-names"]
    assert "set-hostname host2" in fix and "set-hostname host3" in fix, "else two of them still have one name"
    same = cluster(host(1), host(2), host(2))
    found = everything(same)
    assert named(found) == {"same-machine": ("host2", "host3")} and "-H host2:8" in found[0].fix


# -- what the network does ------------------------------------------------------------------------------------
def links(count: int = 3, **changes: Any) -> Links:
    names = [f"host{number}" for number in range(1, count + 1)]
    found = Links(
        chosen={name: Chosen("eth0", f"10.0.0.{number}", "10.0.0.0/24") for number, name in enumerate(names, 1)},
        reach={one: {two: {"seconds": 1e-4, "source": ""} for two in names if two != one} for one in names},
        flows={pair: {"bytes": 10**9, "seconds": 1.0} for pair in examine.ring(names)},
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def network(found: Links) -> list[Finding]:
    return list(checks_network.network(cluster(*(host(n) for n in range(1, len(found.chosen) + 1))), found))


def test_a_healthy_network() -> None:
    assert network(links()) == []


def failing(pairs: dict[tuple[int, int], str], count: int = 4) -> dict[str, tuple[str, ...]]:
    found = links(count)
    for (one, two), kind in pairs.items():
        found.reach[f"host{one}"][f"host{two}"] = {"error": kind, "text": "why"}
    return named(network(found))


def test_ways_that_are_closed() -> None:
    everyone_to_3 = {(n, 3): "timeout" for n in (1, 2, 4)}
    assert failing(everyone_to_3) == {"closed-port": ("host3", "host1", "host2", "host4")}
    assert failing({(2, 4): "refused"}) == {"closed-port": ("host2", "host4")}
    assert failing({(2, 4): "silent"}) == {"silent-network": ("host2", "host4")}
    # whoever has no way to a host cannot answer it: one finding, not two
    assert failing({(2, 4): "no route", (4, 2): "timeout"}) == {"no-route": ("host2", "host4")}
    # two faults are two findings
    assert failing({**everyone_to_3, (1, 2): "no route"}).keys() == {"closed-port", "no-route"}


def test_speed() -> None:
    one_slow = links()
    one_slow.flows["host2", "host3"] = {"bytes": 2 * 10**7, "seconds": 1.0}
    assert named(network(one_slow)) == {"slow-link": ("host2", "host3")}
    all_slow = links(flows={pair: {"bytes": 10**7, "seconds": 1.0} for pair in links().flows})
    assert [finding.id for finding in network(all_slow)] == ["slow-link"] * 3
    # half of a fast network is still fast
    uneven = links()
    uneven.flows["host2", "host3"] = {"bytes": 3 * 10**8, "seconds": 1.0}
    assert network(uneven) == []
    stalled = links()
    stalled.flows["host2", "host3"] = {"error": "silent", "text": "nothing went through for 2 s"}
    assert named(network(stalled)) == {"bulk-stalls": ("host2", "host3")}


def test_interfaces() -> None:
    assert named(network(links(unbound={"host2": "Cannot assign"}))) == {"no-port": ("host2",)}
    none = links(no_network=ConfigError("rule", "came", "remedy"), chosen={}, reach={}, flows={})
    found = list(checks_network.network(cluster(host(1), host(2)), none))
    assert named(found) == {"no-common-network": ()} and found[0].fix == "remedy"


def test_run_directory() -> None:
    def check(found: RunFolder) -> dict[str, tuple[str, ...]]:
        return named(list(checks_network.folder(cluster(host(1), host(2), host(3)), found)))

    names = ["host1", "host2", "host3"]
    shared = RunFolder("/data/runs", True, {name: {} for name in names}, {name: names for name in names})
    assert check(shared) == {}
    apart = RunFolder("/data/runs", True, shared.written, {name: [name] for name in names})
    assert check(apart) == {"run-dir-not-shared": ("host2", "host3")}
    apart.asked = False  # the default folder is each host's own where nothing is shared
    assert [finding.severity for finding in checks_network.folder(cluster(host(1), host(2), host(3)), apart)] == [
        "note"
    ]
    read_only = {"error": "Read-only file system", "errno": "EROFS"}
    assert check(RunFolder("/d", True, {"host1": read_only, "host2": {}, "host3": {}}, shared.seen)) == {
        "run-dir-not-writable": ("host1",)
    }
    full = {"error": "Disk quota exceeded", "errno": "EDQUOT"}
    assert check(
        RunFolder("/d", True, {"host1": {}, "host2": {}, "host3": full}, {name: names[:2] for name in names})
    ) == {"full-disk": ("host3",)}


# -- findings -------------------------------------------------------------------------------------------------
def test_the_exit_code_says_the_worst() -> None:
    def finding(severity: findings.Severity) -> Finding:
        return Finding("x", severity, ("host1",), "what", "why", "fix")

    note, warning, error = finding("note"), finding("warning"), finding("error")
    assert [findings.exit_code(its) for its in ([], [note], [note, warning], [warning, error, note])] == [0, 0, 1, 2]
    assert findings.worst_first([note, error, warning, error]) == [error, warning, note]
    assert json.loads(json.dumps(findings.as_json([error])))[0]["hosts"] == ["host1"]
