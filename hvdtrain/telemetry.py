"""The run log: a directory that tells what ran, how fast, and how it ended.

    runs/<name>/run.json       what ran: versions, world, effective batch, learning rate, config, status, result
    runs/<name>/events.jsonl   what happened: one JSON object a line, written as the run goes
    runs/<name>/tensorboard/   the same scalars for TensorBoard

Rank 0 writes; the other ranks hold the same object and only take part where a method says so. Everything is strict
JSON: NaN and infinities, which JSON lacks, are the strings "nan", "inf", "-inf" (Python's `float` reads them).
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.errors import ConfigError
from hvdtrain.records import end_last_line, plain, read_events, read_run, to_json, write_json
from hvdtrain.tensorboard import ScalarWriter
from hvdtrain.world import World

__all__ = ["RunLog", "read_events", "read_run"]

# steps that end within this time share one event and one refresh of the progress line
EVENT_EVERY_S = 0.1
# without a terminal the progress is a line in a log: rarer
LINE_EVERY_S = 5.0
# what reached the operating system survives a killed process
FLUSH_EVERY_S = 1.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_TOLD_VERSIONS = ("hvdtrain", "horovod", "numpy", "torch", "tensorflow", "tensorflow-cpu", "keras")


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
        self._writer: _Writer | None = None
        self._window = _Window()
        self._phase_totals: dict[str, float] = {}
        world.on_main(self._open, dict(config), resume, progress, tensorboard)

    def _open(self, config: dict[str, Any], resume: bool, progress: bool, tensorboard: bool) -> None:
        try:
            self._writer = _Writer(self.run_dir, resume)
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
        """Add one step; return whether an event is due."""
        self.steps += 1
        self._position = position
        self._samples += samples
        if loss is not None:
            self._losses.append(float(loss))
        for phase, value in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + float(value)
        return time.perf_counter() >= self._due

    def take(self) -> dict[str, Any]:
        """Return the fields of one event over the steps since the last, and begin anew."""
        now = time.perf_counter()
        fields = {
            **self._position,
            "steps": self.steps,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "samples": self._samples,
            "samples_per_s": self._samples / max(now - self._since, 1e-9),
            "seconds": self._seconds,
        }
        self._since, self._due = now, now + EVENT_EVERY_S
        self._reset()
        return fields


class _Writer:
    """Rank 0's side: holds the lock and the files."""

    def __init__(self, run_dir: Path, resume: bool) -> None:
        self.run: dict[str, Any] = {}
        self._dir = run_dir
        self._lock: TextIO | None = None
        self._events: TextIO | None = None
        self._board: ScalarWriter | None = None
        self._line: _Line | None = None
        self._last_flush = 0.0
        self._warned = False
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = _lock(run_dir)
            self._earlier = self._check_earlier(resume)
        except BaseException:
            self.close()
            raise

    def _check_earlier(self, resume: bool) -> dict[str, Any] | None:
        earlier = read_run(self._dir)
        if earlier is not None and not resume:
            raise ConfigError(
                "a run directory holds one run",
                f"{self._dir} holds a run from {earlier.get('started')} (status: {earlier.get('status')})",
                "give another run directory, or resume this run (--resume)",
            )
        return earlier

    def start(self, world: World, config: dict[str, Any], *, progress: bool, tensorboard: bool) -> None:
        earlier = self._earlier or {}
        attempts = list(earlier.get("attempts", []))
        attempts.append({"started": _now(), "size": world.size, "pid": os.getpid(), "host": socket.gethostname()})
        self.run = plain(
            {
                "format": 1,
                "status": "running",
                "started": earlier.get("started", attempts[-1]["started"]),
                "ended": None,
                "versions": _versions(),
                "launcher": world.launcher,
                "world": {"size": world.size, "local_size": world.local_size, "engine": world.engine,
                          "devices": world.devices, "seed": world.seed},
                "effective_batch": _effective_batch(config, world.size),
                "lr": config.get("lr"),
                "config": config,
                "result": earlier.get("result", {}),
                "error": None,
                "attempts": attempts,
            }
        )  # fmt: skip
        write_json(self._dir / "run.json", self.run)
        end_last_line(self._dir / "events.jsonl")
        self._events = open(self._dir / "events.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (held as long as the run)
        self.event("resume" if earlier else "start", {"size": world.size, "config": config})
        self._line = _Line(config.get("total_samples")) if progress else None
        self._board = ScalarWriter(self._dir / "tensorboard") if tensorboard else None

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._guarded(self._write_event, kind, fields)

    def _write_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        assert self._events is not None
        self._events.write(to_json({"time": round(time.time(), 3), "kind": kind, **fields}) + "\n")
        now = time.monotonic()
        if kind != "step" or now - self._last_flush >= FLUSH_EVERY_S:
            self._events.flush()
            if self._board is not None:
                self._board.flush()
            self._last_flush = now

    def progress(self, fields: dict[str, Any]) -> None:
        self.event("step", fields)
        if self._line is not None:
            self._line.show(fields)
        scalars = {f"train/{name}": fields[name] for name in ("loss", "lr", "samples_per_s")}
        self._guarded(self._scalars, scalars, fields["step"])

    def epoch(self, epoch: int, metrics: Mapping[str, float], seconds: float, per_rank: list[dict[str, float]]) -> None:
        self.event("epoch", {"epoch": epoch, "metrics": dict(metrics), "seconds": seconds, "ranks": per_rank})
        if self._line is not None:
            self._line.epoch(epoch, metrics, seconds)
        self._guarded(self._scalars, {f"epoch/{name}": value for name, value in metrics.items()}, epoch)

    def _scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        if self._board is not None:
            self._board.add({name: float(value) for name, value in scalars.items() if value is not None}, step)

    def update(self, **fields: Any) -> None:
        self.run.update(plain(fields))
        self._guarded(write_json, self._dir / "run.json", self.run)

    def finish(self, status: str, error: str | None) -> None:
        self.event("end", {"status": status, "error": error})
        self.update(status=status, error=error, ended=_now())

    def _guarded(self, write: Any, *args: Any) -> None:
        """Write; what cannot be written (disk full, file server gone) is told once and does not end the training."""
        try:
            write(*args)
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(
                    f"hvdtrain: the run log in {self._dir} is incomplete: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def close(self) -> None:
        """Release files and lock; the lock last, so that the next run finds everything written."""
        if self._line is not None:
            self._line.close()
        for resource in (self._board, self._events, self._lock):
            if resource is not None:
                self._guarded(resource.close)
        self._line = self._board = self._events = self._lock = None


class _Line:
    """The progress line: tqdm on a terminal, else now and then a plain line."""

    def __init__(self, total_samples: int | None) -> None:
        self._bar: Any = None
        self._due = 0.0
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_samples, unit=" samples", unit_scale=True, dynamic_ncols=True, leave=False)

    def show(self, fields: Mapping[str, Any]) -> None:
        text = f"epoch {fields['epoch'] + 1} step {fields['step']}"
        for name in ("loss", "lr"):
            text += f"  {name} {fields[name]:.4g}" if fields[name] is not None else ""
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.n = fields["samples_seen"]
            self._bar.refresh()
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY_S
            print(f"{text}  {fields['samples_per_s']:,.0f} samples/s", flush=True)

    def epoch(self, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        text = f"epoch {epoch + 1} done in {seconds:.1f} s  {numbers}"
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _lock(run_dir: Path) -> TextIO:
    """Take the run directory for this process; the kernel gives it back however the process ends."""
    descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    file = open(descriptor, "r+", encoding="utf-8")  # noqa: SIM115 (held as long as the run)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = file.read().strip() or "an unknown process"
        file.close()
        raise ConfigError(
            "a run directory belongs to one run at a time",
            f"{run_dir} is in use by {owner}",
            "give another run directory, or end that run first",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            file.close()
            raise
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()} since {_now()}\n")
    file.flush()
    return file


def _effective_batch(config: Mapping[str, Any], size: int) -> int | None:
    if "global_batch" in config:
        return config["global_batch"]
    if "per_rank_batch" in config:
        return config["per_rank_batch"] * size * (config.get("accumulate") or 1)
    return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _TOLD_VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
