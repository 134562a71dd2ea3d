"""TensorBoard scalars, through the parts of the ``tensorboard`` package that need no framework.

Its record writer and protocol buffers only: the usual writers (torch's, tensorboardX, ``tf.summary``) import a whole
framework, and TensorFlow followed by a CUDA build of PyTorch in one process crashes.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path


def available() -> bool:
    """True if the ``tensorboard`` package is installed (the extra of that name)."""
    return importlib.util.find_spec("tensorboard") is not None


class ScalarWriter:
    """Appends scalars to a new event file in `folder`; needs the ``tensorboard`` package."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(open(folder / name, "wb"))  # noqa: SIM115 (closed by close())
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars of one step; names with a slash are grouped by what comes before it."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()
