"""Rank 1 comes to its world S seconds after the others, and both say who is there. Usage: late.py FRAMEWORK S|ends"""

from __future__ import annotations

import os
import sys
import time

import hvdtrain
from hvdtrain.core.launchers import detect

if detect(os.environ).rank == 1:
    if sys.argv[2] == "ends":
        sys.exit()
    time.sleep(float(sys.argv[2]))
with hvdtrain.init(sys.argv[1], device="cpu") as world:  # type: ignore[arg-type]
    print("together:", world.gather(world.rank), flush=True)
