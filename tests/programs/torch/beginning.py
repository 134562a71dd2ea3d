"""Runs a program after something has been arranged for its start. Usage: beginning.py taken PROGRAM ARGUMENT ...

taken: under horovodrun, rank 0 listens on the ports that job names and hvdtrain's launcher would make up.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

from hvdtrain.core import variables
from hvdtrain.core.launchers import detect
from hvdtrain.core.slurm import port_of

_, program, *arguments = sys.argv[1:]
listeners = []
detected = detect(os.environ)
if detected.rank == 0 and detected.launcher == "horovodrun":
    ports = {port_of(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]), int(os.environ.get(variables.MASTER_PORT, "0"))}
    listeners = [socket.create_server(("", port)) for port in ports]
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
