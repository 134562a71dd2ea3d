"""Waits to be preempted by the launcher, before its world begins or after the world's end: told_outside.py PLACE"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

place = sys.argv[1]


def wait() -> None:
    """Goes on once the agent has got the signal."""
    print("waiting to be told", flush=True)
    while not Path(os.environ["HVDTRAIN_ENDING"]).read_bytes():
        time.sleep(0.01)


if place == "before":
    wait()
import hvdtrain  # noqa: E402 - as a program that takes long to import

with hvdtrain.init("torch"):
    pass
if place == "after":
    wait()
print("at the end", flush=True)
