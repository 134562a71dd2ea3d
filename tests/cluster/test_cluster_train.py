"""Training over several hosts: horovodrun, mpirun and `hvdtrain launch`, also where interfaces have differing names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster_hosts import Cluster, cluster
from harness import PROGRAMS, Result
from pictures import write_folder

from hvdtrain.datasets import digits

TOLD = PROGRAMS / "cluster" / "told.py"
LAUNCH = ["hvdtrain", "launch"]
TWO_HOSTS = "host1:2,host2:2"
NETWORK = "10.77.0.0/24"
LINES = {
    "horovodrun": ["horovodrun", "--gloo", "-np", "4", "-H", TWO_HOSTS, "--network-interfaces", "eth0"],
    "mpirun": ["mpirun", "-np", "4", "-H", TWO_HOSTS, "--bind-to", "none", "--map-by", "slot",
               "--mca", "btl_tcp_if_include", NETWORK, "--mca", "oob_tcp_if_include", NETWORK],
}  # fmt: skip
# rank, host: local rank of local size, cross rank of cross size
ON_TWO_HOSTS = {f"rank {r}/4 local {r % 2}/2 cross {r // 2}/2 on host{r // 2 + 1}" for r in range(4)}
ON_FOUR_HOSTS = {f"rank {r}/4 local 0/1 cross {r}/4 on host{r + 1}" for r in range(4)}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2) as c:
        yield c


@pytest.fixture(scope="module")
def mixed_hosts() -> Iterator[Cluster]:
    with cluster(4, interfaces=["eth0", "ens5", "enp1s0", "eno1"]) as c:
        # as on every machine with Docker: a network of the same name and address that leads nowhere
        for host in c.hosts:
            for line in (
                "link add docker0 type bridge",
                "address add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
            ):
                c.run(host, ["ip", *line.split()]).check()
        yield c


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every rank runs, on as little data as trains."""
    folder = tmp_path_factory.mktemp("data")
    x_train, y_train, x_test, y_test = digits.load()
    np.savez(folder / "few.npz", x_train=x_train[:149], y_train=y_train[:149], x_test=x_test[:37], y_test=y_test[:37])
    pictures = str(write_folder(folder / "pictures"))
    torch_flags = ["--model", "resnet18", "--data", pictures, "--image-size", "40", "--per-rank-batch", "2"]
    return {
        "keras_mnist": ["hvdtrain.keras_mnist", "--data", f"{folder}/few.npz", "--epochs", "1"],
        "torch_resnet": ["hvdtrain.torch_resnet", *torch_flags, "--epochs", "1", "--workers", "0"],
    }


def command(programs: dict[str, list[str]], name: str, run_dir: Path) -> list[str]:
    return [sys.executable, str(TOLD), *programs[name], "--run-dir", str(run_dir)]


def check_training(done: Result, run_dir: Path, places: set[str], c: Cluster) -> None:
    done.check()
    assert set(re.findall(r"place: (.+)", done.out)) == places, done.text
    run = json.loads((run_dir / "run.json").read_text())
    assert run["status"] == "finished" and run["world"]["size"] == 4
    assert "weights: bit-equal on 4 ranks" in done.out
    assert c.left_after(10) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
@pytest.mark.parametrize("name", ["keras_mnist", "torch_resnet"])
def test_two_hosts_train(
    launcher: str, name: str, hosts: Cluster, programs: dict[str, list[str]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    line = [*LINES[launcher], *command(programs, name, run_dir)]
    # waiting ranks of Open MPI spin, which starves those that compute where ranks outnumber cores
    done = hosts.run("host1", line, env={"OMPI_MCA_mpi_yield_when_idle": "1"}, timeout_s=240)
    check_training(done, run_dir, ON_TWO_HOSTS, hosts)


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["hvdtrain launch", "horovodrun", "mpirun"])
def test_torch_distributed_meets_where_rank_0_finds_a_free_port(launcher: str, hosts: Cluster, tmp_path: Path) -> None:
    """Twice in one process; the ports that hvdtrain launch would make up are taken. Give mpirun a port yourself."""
    program = [str(PROGRAMS / "torch" / "beginning.py"), "taken", str(PROGRAMS / "torch" / "relay.py")]
    legs = [f"{tmp_path}/relay:ddp={updates}" for updates in (2, 3)]
    options = {
        "horovodrun": ["--gloo", "-np", "2"],
        "mpirun": ["-np", "2", "-x", "PATH", "-x", "PYTHONPATH", "-x", "MASTER_ADDR=host1", "-x", "MASTER_PORT=29500"],
        "hvdtrain launch": ["--no-checks", "--log-dir", str(tmp_path / "logs")],
    }[launcher]
    line = [*launcher.split(), *options, "-H", "host1:1,host2:1", sys.executable, *program, *legs]
    done = hosts.run("host1", line, timeout_s=120).check()
    one, two = [json.loads(text) for text in re.findall(r"\{.*\}", done.out)]
    assert one["engine"] == two["engine"] == "ddp" and one["size"] == 2
    assert one["ended"] == two["began"] and two["ended"]["step"] == 5
    assert hosts.left_after(10) == []


@pytest.mark.slow
@pytest.mark.thorough
def test_four_hosts_with_one_rank_each(mixed_hosts: Cluster, programs: dict[str, list[str]], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    program = command(programs, "torch_resnet", run_dir)
    everywhere = "host1:1,host2:1,host3:1,host4:1"
    launch: list[str | Path] = [*LAUNCH, "-np", "4", "-H", everywhere, "--log-dir", tmp_path / "logs", "--", *program]
    done = mixed_hosts.run("host1", launch, timeout_s=240)
    check_training(done, run_dir, ON_FOUR_HOSTS, mixed_hosts)


def test_hosts_whose_own_names_mean_127_0_1_1_as_debian_installs_them(hosts: Cluster, tmp_path: Path) -> None:
    before = {host: (hosts.etc(host) / "hosts").read_text() for host in hosts.hosts}
    code = "import horovod.torch as hvd; hvd.init(); print('place:', hvd.rank()); hvd.shutdown()"
    launch: list[str | Path] = [*LAUNCH, "--no-checks", "-H", "host1:1,host2:1", "--log-dir", tmp_path / "logs"]
    try:
        for host, text in before.items():
            others = [line for line in text.splitlines() if not line.endswith(f" {host}")]
            (hosts.etc(host) / "hosts").write_text("\n".join([f"127.0.1.1 {host}", *others, ""]))
        done = hosts.run("host1", [*launch, "--", sys.executable, "-c", code], timeout_s=120)
    finally:
        for host, text in before.items():
            (hosts.etc(host) / "hosts").write_text(text)
    assert done.returncode == 0 and sorted(re.findall(r"place: (\d)", done.out)) == ["0", "1"], done.text
