"""Runs a program after something has been arranged for its start. Usage: beginning.py HOW PROGRAM ARGUMENT ...

taken: rank 0 listens on the port that is worked out from the job's name, and on the one that hvdtrain's launcher names.
without-mpi4py: as where it is not installed.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

from hvdtrain.core import variables
from hvdtrain.core.launchers import _JOB_VARIABLES, detect
from hvdtrain.core.slurm import port_of

how, program, *arguments = sys.argv[1:]
listeners = []
detected = detect(os.environ)
if how == "without-mpi4py":
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
elif detected.rank == 0:
    if detected.launcher == "horovodrun":
        ports = {port_of(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]), int(os.environ.get(variables.MASTER_PORT, "0"))}
    else:
        ports = {port_of(*(os.environ[name] for name in _JOB_VARIABLES if name in os.environ))}
    listeners = [socket.create_server(("", port)) for port in ports]
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
