"""When the ranks of a test parted, and how long each lived after that: a thread touches a file until the process ends.

The file is FOLDER/RANK, in the folder that HVDTRAIN_TEST_BEACON names; FOLDER/parted.RANK holds when it came to the
place where ranks part.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hvdtrain
from hvdtrain.core.launchers import detect

_parted = 0.0


def _folder() -> Path:
    return Path(os.environ["HVDTRAIN_TEST_BEACON"])


def start() -> None:
    """Begins to touch the file."""
    place = _folder() / str(detect(os.environ).rank)

    def touch() -> None:
        while True:
            place.touch()
            time.sleep(0.1)

    threading.Thread(target=touch, daemon=True).start()


def parts() -> None:
    """The ranks part here."""
    global _parted
    _parted = time.time()
    (_folder() / f"parted.{detect(os.environ).rank}").write_text(repr(_parted))


def report(way: str, act: Callable[[], object]) -> None:
    """Prints what `act` raised, and how long after the ranks parted."""
    error = ""
    try:
        act()
    except hvdtrain.HvdtrainError as raised:
        error = str(raised)
    print(json.dumps({"way": way, "seconds": time.time() - _parted, "error": error}), flush=True)
