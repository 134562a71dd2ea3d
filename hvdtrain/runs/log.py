"""The run log: a directory that tells what ran, how fast, and how it ended.

    runs/<name>/run.json       what ran: versions, world, effective batch, learning rate, config, status, result
    runs/<name>/events.jsonl   what happened: one JSON object a line, written as the run goes
    runs/<name>/tensorboard/   the same scalars for TensorBoard

Rank 0 writes; the other ranks hold the same object and only take part where a method says so. Everything is strict
JSON: NaN and infinities, which JSON lacks, are the strings "nan", "inf", "-inf" (Python's `float` reads them).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.world import World
from hvdtrain.runs.log_files import RunWriter, read_events, read_run

__all__ = ["RunLog", "read_events", "read_run", "run_status"]

# steps that end within this time share one event and one refresh of the progress line
EVENT_EVERY_S = 0.1


class RunLog:
    """One run's record. Use it as a context manager: an exception marks the run failed, and passes on.

    Args:
        run_dir: made if missing; belongs to one run at a time (a lock that dies with the process).
        world: who writes.
        config: what the user chose. run.json repeats `lr` and, from `global_batch` or `per_rank_batch` (and
            `accumulate`), the effective batch; `total_samples` is where the progress bar ends.
        resume: go on with the run that is in `run_dir`: its events are appended to.
        progress: show progress on rank 0.
        tensorboard: write TensorBoard scalars.

    Raises:
        ConfigError: `run_dir` cannot be written, is in use by another run, or holds another run and `resume` is
            off (`MainRankError` with the same text on ranks other than 0).
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        world: World,
        *,
        config: Mapping[str, Any],
        resume: bool = False,
        progress: bool = True,
        tensorboard: bool = True,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.world = world
        self._writer: RunWriter | None = None
        self._window = _Window()
        self._phase_totals: dict[str, float] = {}
        world.on_main(self._open, dict(config), resume, progress, tensorboard)

    def _open(self, config: dict[str, Any], resume: bool, progress: bool, tensorboard: bool) -> None:
        try:
            self._writer = RunWriter(self.run_dir, resume)
            self._writer.start(self.world, config, progress=progress, tensorboard=tensorboard)
        except OSError as error:
            self._abandon()
            raise ConfigError(
                "the run directory must be a directory that this user can write",
                f"{self.run_dir}: {error.strerror or error}",
                "give another run directory, or make room and rights for this one",
            ) from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def path(self, *parts: str) -> Path:
        """Return a path within the run directory (the same on every rank; made by whoever writes there)."""
        return self.run_dir.joinpath(*parts)

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event; rank 0 only, a no-op elsewhere."""
        if self._writer is not None:
            self._writer.event(kind, fields)

    def step(
        self,
        *,
        step: int,
        epoch: int,
        samples_seen: int,
        loss: float | None,
        lr: float | None,
        samples: int,
        seconds: Mapping[str, float],
    ) -> None:
        """Note one update; cheap, so call it every time, on every rank.

        Args:
            step: updates done, this one included.
            epoch: counted from 0.
            samples_seen: samples of all ranks since the start of training.
            loss, lr: of this update; None where unknown.
            samples: samples of all ranks in this update.
            seconds: phase name to this rank's seconds, for example {"input": 0.01, "compute": 0.2}.
        """
        for phase, value in seconds.items():
            self._phase_totals[phase] = self._phase_totals.get(phase, 0.0) + value
        if self._writer is None:
            return
        position = {"step": step, "epoch": epoch, "samples_seen": samples_seen, "lr": lr}
        if self._window.add(position, loss, samples, seconds):
            self._writer.progress(self._window.take())

    def epoch(self, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Note the end of an epoch, with every rank's seconds by phase; collective: call it on every rank.

        Args:
            epoch: counted from 0.
            metrics: of all ranks together.
            seconds: wall-clock of the epoch.
        """
        per_rank = self.world.gather(self._phase_totals)
        self._phase_totals = {}
        if self._writer is not None:
            self._end_window()
            self._writer.epoch(epoch, metrics, seconds, per_rank)

    def _end_window(self) -> None:
        """Write the steps that no event has told of yet."""
        if self._writer is not None and self._window.steps:
            self._writer.progress(self._window.take())

    def result(self, **fields: Any) -> None:
        """Merge `fields` into the result in run.json; rank 0 only, a no-op elsewhere."""
        if self._writer is not None:
            self._writer.update(result={**self._writer.run["result"], **fields})

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Write how the run ended and let go of the directory; the second call does nothing."""
        if self._writer is not None:
            self._end_window()
            self._writer.finish(status, error)
            self._abandon()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        well = exc is None or (isinstance(exc, SystemExit) and exc.code in (None, 0))
        if well:
            self.finish()
        else:
            assert exc_type is not None
            self.finish("failed", f"{exc_type.__name__}: {exc}")


class _Window:
    """Adds up steps until an event is due: always for a step that took EVENT_EVERY_S or more."""

    def __init__(self) -> None:
        self._since = self._due = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self._position: dict[str, Any] = {}
        self._samples = 0
        self._losses: list[float] = []
        self._seconds: dict[str, float] = {}

    def add(self, position: dict[str, Any], loss: float | None, samples: int, seconds: Mapping[str, float]) -> bool:
        """Add one step; return whether an event is due. A micro-batch that completes no update has no samples, and
        only its seconds count."""
        self.steps += samples > 0 or loss is not None
        self._position = position
        self._samples += samples
        if loss is not None:
            self._losses.append(float(loss))
        for phase, value in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + float(value)
        return self.steps > 0 and time.perf_counter() >= self._due

    def take(self) -> dict[str, Any]:
        """Return the fields of one event over the steps since the last, and begin anew."""
        now = time.perf_counter()
        # the steps' own time, where the caller measures it: validation and checkpoints lie between two windows
        elapsed = sum(self._seconds.values()) or now - self._since
        fields = {
            **self._position,
            "steps": self.steps,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "samples": self._samples,
            "samples_per_s": self._samples / max(elapsed, 1e-9),
            "seconds": self._seconds,
        }
        self._since, self._due = now, now + EVENT_EVERY_S
        self._reset()
        return fields


def run_status(run_dir: str | os.PathLike[str]) -> str | None:
    """Return "running", "finished", "failed", "killed" (nobody is left to end it), or None if no run is there."""
    run = read_run(run_dir)
    if run is None or run.get("status") != "running":
        return None if run is None else str(run.get("status"))
    try:
        with open(Path(run_dir) / ".lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except FileNotFoundError:
        pass  # a copy of a run: whoever wrote it holds no lock here
    return "killed"
