"""Environment variables of hvdtrain: each with what it means, and what reads it.

No other module spells a name (`tests/unit/test_structure.py`).
"""

from __future__ import annotations

# Set by users:
BUCKET_BYTES = "HVDTRAIN_BUCKET_BYTES"  # bytes of gradients that go as one; torch with Horovod
CACHE = "HVDTRAIN_CACHE"  # folder of built wheels; `hvdtrain build-horovod`
CHECK_EVERY_STEP = "HVDTRAIN_CHECK_EVERY_STEP"  # look for numbers that are not finite at once; torch
CIFAR10_URL = "HVDTRAIN_CIFAR10_URL"  # a mirror, whose file has the same hash; datasets
COMPRESSION = "HVDTRAIN_COMPRESSION"  # how gradients travel; `prepare` of torch and keras
HANG_S = "HVDTRAIN_HANG_S"  # how long a rank may let others wait; watch
IN_STEP_S = "HVDTRAIN_IN_STEP_S"  # how long a rank may be in one place before ranks are compared; watch
MNIST_URL = "HVDTRAIN_MNIST_URL"  # a mirror, whose file has the same hash; datasets
PREEMPTION = "HVDTRAIN_PREEMPTION"  # off: signals end a rank at once; watch
RESTART = "HVDTRAIN_RESTART"  # how often the job was started before; `core.launchers`
RUN_DIR = "HVDTRAIN_RUN_DIR"  # folder for what ranks leave when they hang; watch
START_TIMEOUT_S = "HVDTRAIN_START_TIMEOUT_S"  # how long ranks wait for one another at the start; `comm.arrival`
TUNED = "HVDTRAIN_TUNED"  # file of `hvdtrain bench train --tune`; `world.startup`

# Set by hvdtrain for processes that it starts:
AGENT_FD = "HVDTRAIN_AGENT_FD"  # descriptor of a rank's line to its host's agent; `comm.agent`
ELASTIC = "HVDTRAIN_ELASTIC"  # how a rank of an elastic job starts; `comm.elastic`
ELASTIC_ANSWERS = "HVDTRAIN_ELASTIC_ANSWERS"  # file with what workers that join later need; `comm.elastic`
ELASTIC_SIZE = "HVDTRAIN_ELASTIC_SIZE"  # of the first formation; `comm.elastic`
ELASTIC_SLOT = "HVDTRAIN_ELASTIC_SLOT"  # of this host's, and how many; `comm.elastic`
ELASTIC_JOB = (ELASTIC, ELASTIC_ANSWERS, ELASTIC_SIZE, ELASTIC_SLOT)
ENDING = "HVDTRAIN_ENDING"  # file in which the agent writes that the job is to end; `watch.preemption`
JOB = "HVDTRAIN_JOB"  # name of the job, for ranks of one; `core.launchers`
LAUNCH = "HVDTRAIN_LAUNCH"  # marks all that an agent has started for one attempt of a job; `comm.ring`
MASTER_PORT = "HVDTRAIN_MASTER_PORT"  # the MASTER_PORT that the launcher chose; `core.launchers`
MPI_RPATH = "HVDTRAIN_MPI_RPATH"  # folder of MPI's library; a patch of Horovod's build
REHEARSAL = "HVDTRAIN_REHEARSAL"  # folder of a rehearsed job's runs; `record.folder`
RESULT_FD = "HVDTRAIN_RESULT_FD"  # descriptor for the result of a function; `cluster.function`
TORCH_CXX_STANDARD = "HVDTRAIN_TORCH_CXX_STANDARD"  # that PyTorch was built with; a patch of Horovod's build
TURNS_ADDRESS = "HVDTRAIN_TURNS_ADDRESS"  # socket of a benchmark whose jobs take turns; `comm.turns`
TURNS_KEY = "HVDTRAIN_TURNS_KEY"  # of that socket; `comm.turns`
TURNS_TRAINING = "HVDTRAIN_TURNS_TRAINING"  # set: prepared trainings take turns; `comm.turns`


def without_none(value: str | None) -> str | None:
    """Returns None for a variable that is empty or "none", which overrides a tuned setting; else its value."""
    return None if value in ("", "none") else value
