"""Whether this process belongs to a job that was started again, and which job that is: read from the environment only.

A job that Slurm requeues after a preemption, or that `hvdtrain launch --max-restarts` starts again after a failure,
runs the same command line as before: the programs go on with the job's own run without being told to.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.core.errors import LauncherError

RESTART, JOB = "HVDTRAIN_RESTART", "HVDTRAIN_JOB"  # what hvdtrain's own launcher sets


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often this job was started again, 0 for the first time; pure.

    HVDTRAIN_RESTART counts where it is set, else SLURM_RESTART_COUNT, which sbatch sets from the first requeue on.

    Raises:
        LauncherError: not a whole number.
    """
    name = next((name for name in (RESTART, "SLURM_RESTART_COUNT") if environ.get(name, "") != ""), None)
    if name is None:
        return 0
    if not (environ[name].isascii() and environ[name].isdigit()):
        raise LauncherError(
            f"{name} tells how often a job was started again: a whole number", repr(environ[name]), f"unset {name}"
        )
    return int(environ[name])


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return what names this job, the same each time it is started; None where nothing does; pure."""
    if environ.get(JOB):
        return environ[JOB]
    job = environ.get("SLURM_JOB_ID")
    return f"slurm-{environ.get('SLURM_CLUSTER_NAME') or 'cluster'}-{job}" if job else None
