"""The command lines of other launchers that a job stands for; pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from hvdtrain.cluster.launch import environment
from hvdtrain.cluster.launch.job import Job, JobPlan
from hvdtrain.core import variables


def horovodrun(plan: JobPlan, environ: Mapping[str, str]) -> str:
    """Returns the horovodrun command that starts the same ranks, and after it what it cannot do.

    horovodrun passes on the `environ` in which it is typed. What that lacks is set in the line, except secrets.
    """
    job = plan.job
    words = ["horovodrun", "--gloo", "-np", str(job.np), "-H", _hosts(job)]
    words += job.ssh.place("--ssh-port", "--ssh-identity-file")
    more = {name: value for name, value in sorted(job.env.items()) if environ.get(name) != value}
    secret = [name for name, value in more.items() if environment.is_secret(name, value)]
    hidden = {*secret, variables.JOB, variables.RESTART}
    settings = [f"{name}={value}" for name, value in more.items() if name not in hidden]
    words = ["env", *settings, *words] if settings else words
    notes = [f"with {', '.join(secret)} set where this is typed"] if secret else []
    names = list(dict.fromkeys(plan.chosen[host.name].interface for host in plan.hosts))
    if len(names) == 1:
        words += ["--network-interfaces", names[0]]
    else:
        differing = ", ".join(f"{plan.chosen[host.name].interface} on {host.name}" for host in plan.hosts)
        notes.append(f"horovodrun itself needs one interface name, here: {differing}")
    if plan.notes:
        notes.append("horovodrun itself takes the first address of an interface, which is another one here")
    if "CUDA_VISIBLE_DEVICES" in job.env and len(plan.hosts) > 1:
        notes.append("horovodrun itself passes CUDA_VISIBLE_DEVICES to no other host")
    line = shlex.join([*words, *job.argv])
    return f"{line}   # {'; '.join(notes)}" if notes else line


def mpirun(plan: JobPlan, environ: Mapping[str, str]) -> str:
    """Returns the mpirun command (Open MPI) that starts the same ranks, through the same network.

    Variables that the `environ` in which it is typed has need no value in the line; secrets must be set there.
    """
    job = plan.job
    words = ["mpirun", "-np", str(job.np), "-H", _hosts(job), "--bind-to", "none", "--map-by", "slot"]
    networks = dict.fromkeys(plan.chosen[host.name].network for host in plan.hosts)
    for parameter in ("btl_tcp_if_include", "oob_tcp_if_include"):
        words += ["--mca", parameter, ",".join(networks)]
    ssh = job.ssh.place("-p", "-i")
    words += ["--mca", "plm_rsh_args", shlex.join(ssh)] if ssh else []
    to_set = []
    for name, value in sorted(job.env.items()):
        if environ.get(name) == value:
            words += ["-x", name]
        elif environment.is_secret(name, value):
            words += ["-x", name]
            to_set.append(name)
        elif name not in (variables.JOB, variables.RESTART):
            words += ["-x", f"{name}={value}"]
    line = shlex.join([*words, *job.argv])
    return f"{line}   # with {', '.join(to_set)} set where this is typed" if to_set else line


def _hosts(job: Job) -> str:
    return ",".join(f"{host.name}:{count}" for host, count in job.ranks.items())
