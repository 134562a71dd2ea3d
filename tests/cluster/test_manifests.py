"""The job files for OpenPAI, the MPI Operator and Kubeflow Trainer: their parts agree, and their commands train."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cluster_hosts
import pytest
import yaml
from harness import REPOSITORY, clean_environment

from hvdtrain import keras_mnist, torch_resnet
from hvdtrain.core.launchers import detect

Job = dict[str, Any]
# what a rank sees: the launcher's world and, with hvdtrain joined, the engine's
RANK = """\
import os, socket, sys
import hvdtrain
from hvdtrain.core.launchers import job_of, restarts
with hvdtrain.init("torch") as world:
    told = (world.rank, world.local_rank, socket.gethostname(), restarts(os.environ), job_of(os.environ), sys.argv[1:])
    for line in world.gather(told):
        if world.is_main:
            print("RANK", world.launcher, world.engine, world.size, *line, flush=True)
"""


def load(name: str, document: int = 0) -> Job:
    return list(yaml.safe_load_all((REPOSITORY / "scripts" / name).read_text()))[document]


@pytest.fixture
def openpai() -> Job:
    return load("openpai.yaml")


@pytest.fixture
def mpijob() -> Job:
    return load("mpijob.yaml")


@pytest.fixture
def trainjob() -> tuple[Job, Job]:
    """The runtime, and the job on it."""
    return load("trainjob.yaml", 0), load("trainjob.yaml", 1)


def worker(job: Job) -> Job:
    return job["taskRoles"]["worker"]


def pod(runtime: Job, which: str) -> Job:
    """The pods' specification of a replicated job of Kubeflow Trainer's runtime."""
    jobs = {each["name"]: each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    return jobs[which]["template"]["spec"]["template"]["spec"]


def replicas(job: Job, which: str) -> Job:
    return job["spec"]["mpiReplicaSpecs"][which]


def container(job: Job, which: str) -> Job:
    return replicas(job, which)["template"]["spec"]["containers"][0]


# ---- what the files say about themselves


def test_openpai_numbers_and_names_agree(openpai: Job) -> None:
    role, parameters = worker(openpai), openpai["parameters"]
    assert role["dockerImage"] in {each["name"] for each in openpai["prerequisites"]}
    assert role["resourcePerInstance"]["gpu"] == parameters["gpus"]
    assert role["completion"]["minSucceededInstances"] == role["instances"]
    used = set(re.findall(r"<% \$parameters\.(\w+) %>", " ".join(role["commands"])))
    assert used == set(parameters)
    assert parameters["program"] == "hvdtrain.torch_resnet"
    args = torch_resnet.parser().parse_args(shlex.split(parameters["arguments"]))
    assert args.run_dir is not None  # so that a job that is started again finds its run
    assert "SynPort" in role["resourcePerInstance"]["ports"]
    # OpenPAI's portal joins commands: comments and line continuations break it
    assert not any(character in command for command in role["commands"] for character in "#\\\n")


def test_mpijob_numbers_and_names_agree(mpijob: Job) -> None:
    launcher, worker_ = container(mpijob, "Launcher"), container(mpijob, "Worker")
    args = launcher["args"]
    assert int(args[args.index("-np") + 1]) == mpijob["spec"]["slotsPerWorker"] * replicas(mpijob, "Worker")["replicas"]
    assert args[args.index("python") :][:3] == ["python", "-m", "hvdtrain.keras_mnist"]
    flags = keras_mnist.parser().parse_args(args[args.index("hvdtrain.keras_mnist") + 1 :])
    mounts = {mount["name"]: mount["mountPath"] for mount in worker_["volumeMounts"]}
    assert flags.run_dir.is_relative_to(mounts["runs"])
    assert mounts.keys() == {volume["name"] for volume in replicas(mpijob, "Worker")["template"]["spec"]["volumes"]}
    forwarded = {args[at + 1] for at, word in enumerate(args) if word == "-x"}
    assert forwarded <= {each["name"] for each in launcher["env"]}


def test_trainjob_agrees_with_its_runtime_and_with_the_mpijob(trainjob: tuple[Job, Job], mpijob: Job) -> None:
    runtime, job = trainjob
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer, mpi = job["spec"]["trainer"], runtime["spec"]["mlPolicy"]["mpi"]
    assert not mpi["runLauncherAsNode"]
    assert int(trainer["args"][trainer["args"].index("-np") + 1]) == trainer["numNodes"] * trainer["numProcPerNode"]
    assert trainer["args"] == container(mpijob, "Launcher")["args"]
    for which, twin in (("launcher", "Launcher"), ("node", "Worker")):
        (its,), as_mpijob = pod(runtime, which)["containers"], container(mpijob, twin)
        assert its["name"] == "node"  # whom the Trainer gives key, host file and, in the launcher, the job's args
        assert its.get("args") == (as_mpijob["args"] if which == "node" else None)
        for field in ("image", "securityContext", "resources", "volumeMounts", "ports", "readinessProbe"):
            assert its.get(field) == as_mpijob.get(field), field
        its_pod, its_twin = pod(runtime, which), replicas(mpijob, twin)
        assert its_pod["restartPolicy"] == its_twin["restartPolicy"]
        for field in ("securityContext", "volumes"):
            assert its_pod.get(field) == its_twin["template"]["spec"].get(field)
        env = {each["name"]: each.get("value") for each in its["env"]}
        assert env["HVDTRAIN_SSH_KEY"] == f"{mpi['sshAuthMountPath']}/id_rsa"  # the Trainer's name for it
    launcher = {each["name"] for each in pod(runtime, "launcher")["containers"][0]["env"]}
    assert launcher == {each["name"] for each in container(mpijob, "Launcher")["env"]}


# ---- their environments


def openpai_environment(task: int, tasks: int, port: int) -> dict[str, str]:
    """What OpenPAI sets in a container of role "worker" (its manual, "Environmental Variables and Port Reservation"),
    and FrameworkController's number of the attempt; all tasks are on this machine."""
    each: dict[str, str] = {}
    for index in range(tasks):
        each |= {f"PAI_HOST_IP_worker_{index}": "127.0.0.1", f"PAI_PORT_LIST_worker_{index}_SynPort": str(port + index)}
    return each | {
        "PAI_JOB_NAME": "somebody~hvdtrain_resnet50", "PAI_USER_NAME": "somebody",
        "PAI_TASK_ROLE_COUNT": "1", "PAI_TASK_ROLE_LIST": "worker", "PAI_TASK_ROLE_TASK_COUNT_worker": str(tasks),
        "PAI_RESOURCE_worker": "gpu_count:1,cpu_count:1,memMB:1024,shmMB:64", "PAI_CURRENT_TASK_ROLE_NAME": "worker",
        "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": str(task), "FC_FRAMEWORK_ATTEMPT_ID": "3",
    }  # fmt: skip


def test_openpai_is_detected() -> None:
    found = detect(openpai_environment(1, 2, 5000))
    assert (found.launcher, found.rank, found.size, found.node) == ("openpai", 1, 2, 1)
    assert found.rendezvous == "127.0.0.1:5000"


@pytest.mark.thorough
def test_openpai_commands_train_over_two_tasks(openpai: Job, tmp_path: Path) -> None:
    """The file's own commands, in one shell a task, with the environment of each task."""
    (tmp_path / "rank_program.py").write_text(RANK)
    parameters = openpai["parameters"] | {"gpus": 1, "program": "rank_program"}
    script = "\n".join(worker(openpai)["commands"])
    script = re.sub(r"<% \$parameters\.(\w+) %>", lambda found: str(parameters[found[1]]), script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    tasks: list[subprocess.Popen[str]] = []
    try:
        for index in range(2):
            env = clean_environment(openpai_environment(index, 2, port) | {"PATH": path})
            command = ["timeout", "--signal=KILL", "90", "bash", "-euc", script]
            tasks.append(subprocess.Popen(command, env=env, cwd=tmp_path, stdout=-1, stderr=-1, text=True))
        said = [task.communicate(timeout=100) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0], said
    lines = [line for line in said[0][0].splitlines() if line.startswith("RANK")]
    expected = shlex.split(parameters["arguments"])
    assert lines == [
        f"RANK torchrun ddp 2 {rank} 0 {socket.gethostname()} 3 somebody~hvdtrain_resnet50 {expected}"
        for rank in range(2)
    ], said


def operator_environment(slots: int) -> dict[str, str]:
    """What the MPI Operator adds to the launcher's environment (launcherEnvVars, ompiEnvVars and openMPISlotsEnv in its
    pkg/controller/mpi_job_controller.go)."""
    return {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(slots),
        "NVIDIA_VISIBLE_DEVICES": "",
        "NVIDIA_DRIVER_CAPABILITIES": "",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }


def trainer_environment(slots: int) -> dict[str, str]:
    """What Kubeflow Trainer adds to it (EnforceMLPolicy in its pkg/runtime/framework/plugins/mpi/mpi.go)."""
    there_too = ("orte_keep_fqdn_hostnames", "orte_default_hostfile", "plm_rsh_args", "orte_set_default_slots")
    variables = operator_environment(slots)
    return {name: value for name, value in variables.items() if name.removeprefix("OMPI_MCA_") in there_too}


@pytest.mark.parametrize(
    ("file", "document", "environment"),
    [
        ("mpijob.yaml", 0, operator_environment),
        pytest.param("trainjob.yaml", 1, trainer_environment, marks=pytest.mark.thorough),
    ],
)
def test_its_command_trains_over_two_pods(
    file: str, document: int, environment: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    """The file's own command in a launcher that is no rank, with the operator's environment and host file; two hosts
    with an sshd each."""
    (tmp_path / "rank_program.py").write_text(RANK)
    job = load(file, document)
    args = job["spec"]["trainer"]["args"] if document else container(job, "Launcher")["args"]
    program = args.index("hvdtrain.keras_mnist")
    # by its path: in the image, sshd gives PATH to what it starts
    command = [*args[: program - 2], sys.executable, str(tmp_path / "rank_program.py"), *args[program + 1 :]]
    command[command.index("-np") + 1] = "2"
    env = environment(1) | {"HVDTRAIN_RESTART": "1", "HVDTRAIN_JOB": "a-uid"}
    with ExitStack() as stack:
        c = stack.enter_context(cluster_hosts.cluster(3))
        (c.etc("host1") / "mpi").mkdir(mode=0o755)
        (c.etc("host1") / "mpi" / "hostfile").write_text("host2 slots=1\nhost3 slots=1\n")
        done = c.run("host1", command, env=env, cwd=tmp_path, timeout_s=90).check()
    lines = [line for line in done.out.splitlines() if line.startswith("RANK")]
    flags = args[program + 1 :]
    expected = [f"RANK mpirun horovod 2 {rank} 0 host{rank + 2} 1 a-uid {flags}" for rank in range(2)]
    assert lines == expected, done.text
