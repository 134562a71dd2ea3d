"""Runs a module as a program, and tells each rank's place as Horovod has it; usage: told.py MODULE FLAGS..."""

from __future__ import annotations

import importlib
import runpy
import socket
import sys
from typing import Any

import hvdtrain

init = hvdtrain.init


def telling(framework: str, **options: Any) -> Any:
    world = init(framework, **options)  # type: ignore[arg-type]
    hvd = importlib.import_module(f"horovod.{'torch' if framework == 'torch' else 'tensorflow'}")
    place = f"local {hvd.local_rank()}/{hvd.local_size()} cross {hvd.cross_rank()}/{hvd.cross_size()}"
    # one write, that mpirun cannot put another rank's into the middle of
    sys.stdout.write(f"place: rank {hvd.rank()}/{hvd.size()} {place} on {socket.gethostname()}\n")
    sys.stdout.flush()
    return world


hvdtrain.init = telling  # type: ignore[assignment]
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
