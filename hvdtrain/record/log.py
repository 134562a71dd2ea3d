"""The run log: a directory that records what ran, how fast, and how it ended.

    runs/<name>/run.json       the run: versions, world, effective batch, learning rate, config, status, result
    runs/<name>/events.jsonl   its events: one JSON object a line, written during the run
    runs/<name>/tensorboard/   the same scalars for TensorBoard

Rank 0 writes. The other ranks hold the same object and only take part in methods whose docstrings mention it. All
files are strict JSON: NaN and infinities, which JSON lacks, are the strings "nan", "inf", "-inf" (`float` reads them).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import math
import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.core.errors import ConfigError, Preempted, ended_by, note_exits
from hvdtrain.core.launchers import job_of
from hvdtrain.record import gpu, log_files, stats
from hvdtrain.record.bottleneck import RunFacts, phases_per_rank, verdict
from hvdtrain.record.folder import place_of
from hvdtrain.record.log_files import read_events, read_run
from hvdtrain.world.world import World

__all__ = ["RunLog", "read_events", "read_run", "run_status"]

# what reached the operating system survives a killed process
FLUSH_EVERY_S = 1.0
_LOGS: weakref.WeakSet[RunLog] = weakref.WeakSet()  # of this program
_RECORDED_VERSIONS = ("hvdtrain", "horovod", "numpy", "torch", "tensorflow", "tensorflow-cpu", "keras")


class RunLog:
    """The record of a run. Use it as a context manager: an exception marks the run failed, and propagates.

    A successful run ends with a verdict on its bottleneck: in run.json and, with `progress`, as the last line. If
    nvidia-ml-py is installed, each epoch's event records the use of the GPUs.

    Example:
        with hvdtrain.RunLog("run", world, config={"lr": 0.1, "per_rank_batch": 32}) as run:
            run.step(**optimizer.record())  # after each optimizer.step()
            run.epoch(epoch, scores, seconds=12.5)
            run.result(top1=scores["top1"])

    Args:
        run_dir: made if missing; belongs to one run at a time (a lock that ends with the process).
        world: the ranks; rank 0 writes.
        config: your settings. run.json repeats `lr` and the effective batch, from `global_batch` or `per_rank_batch`
            (and `accumulate`). The progress bar ends at `total_samples`.
        resume: resume the run in `run_dir`, and append to its events.
        progress: show progress on rank 0.
        tensorboard: write TensorBoard scalars.

    Attributes:
        facts: the basis of the verdict's advice (`hvdtrain.record.bottleneck.RunFacts`).

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
        self.run_dir = place_of(run_dir).absolute()  # wherever the program goes
        self.world = world
        self._run: dict[str, Any] = {}  # what run.json holds; on rank 0, as are all files
        self._lock: TextIO | None = None
        self._events: TextIO | None = None
        self._board: log_files.ScalarWriter | None = None
        self._line: log_files.Line | None = None
        self._last_flush = 0.0
        self._warned = self._warned_of_gpus = False
        self._window = log_files.Window()
        self._phase_totals: dict[str, float] = {}
        self._first_step: Mapping[str, float] | None = None  # until an event has it, then empty
        self._epochs: list[dict[str, Any]] = []  # what the verdict reads
        self._options = dict(config), progress, tensorboard
        self._ended = False
        self._gpus = gpu.gpus_of(world.devices)
        self._writing = threading.Lock()  # checkpoints are noted by another thread
        self._saves: list[Mapping[str, Any]] = []
        self._before_end: Callable[[], object] | None = None
        self.facts = RunFacts(local_size=world.local_size, hosts=-(-world.size // max(1, world.local_size)))
        world.on_main(self._open, resume)
        self._pid = os.getpid()
        _LOGS.add(self)
        note_exits()
        atexit.register(self._at_exit)
        world.tracker.use_run_dir(self.run_dir)

    @property
    def _talks(self) -> bool:
        return self._options[1] and self.world.is_main

    def _take_over(self) -> None:
        """Continues the record if an elastic job has lost its rank 0 and this rank has become rank 0."""
        if self.world.is_main and self._events is None and not self._ended:
            with contextlib.suppress(ConfigError):  # the other one still holds it: at the next update
                self._open(resume=True)

    def _open(self, resume: bool) -> None:
        config, progress, tensorboard = self._options
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lock = log_files.lock(self.run_dir)
            self._begin(config, self._earlier(resume))
            self._line = log_files.Line(config.get("total_samples")) if progress else None
            if tensorboard and importlib.util.find_spec("tensorboard") is not None:
                self._board = log_files.ScalarWriter(self.run_dir / "tensorboard")
            elif tensorboard and progress:
                log_files.say("no TensorBoard scalars: the package tensorboard is not installed")
        except OSError as error:
            self._close()
            raise ConfigError(
                "the run directory must be a directory that this user can write",
                f"{self.run_dir}: {error.strerror or error}",
                "give another run directory, or make room and rights for this one",
            ) from error
        except BaseException:
            self._close()
            raise

    def _earlier(self, resume: bool) -> dict[str, Any]:
        earlier = read_run(self.run_dir)
        if earlier is not None and not resume:
            raise ConfigError(
                "a run directory cannot hold two runs",
                f"{self.run_dir} holds a run from {earlier.get('started')}, {log_files.fate(earlier)}",
                "give another run directory; or resume this run: RunLog(..., resume=True), --resume of a program",
                code=41,
            )
        if earlier is None and (self.run_dir / "events.jsonl").exists():
            raise ConfigError(
                "a run directory cannot hold two runs",
                f"{self.run_dir} holds the events of a run (events.jsonl), and no run.json",
                "give another run directory, or move that one away as it is",
                code=41,
            )
        return earlier or {}

    def _begin(self, config: dict[str, Any], earlier: dict[str, Any]) -> None:
        world = self.world
        attempt = {"started": log_files.now(), "size": world.size, "pid": os.getpid(), "host": socket.gethostname()}
        attempts = [*earlier.get("attempts", []), attempt | {"job": job_of(os.environ)}]
        self._run = log_files.plain(
            {
                "format": 1,
                "status": "running",
                "started": earlier.get("started", attempts[-1]["started"]),
                "ended": None,
                "versions": {"python": platform.python_version()} | stats.versions(*_RECORDED_VERSIONS),
                "launcher": world.launcher,
                "world": {"size": world.size, "local_size": world.local_size, "engine": world.engine,
                          "devices": world.devices, "seed": world.seed},
                "effective_batch": log_files.effective_batch(config, world.size),
                "lr": config.get("lr"),
                "config": config,
                "result": earlier.get("result", {}),
                "error": None,
                "attempts": attempts,
            }
        )  # fmt: skip
        log_files.write_json(self.run_dir / "run.json", self._run)
        log_files.end_last_line(self.run_dir / "events.jsonl")
        self._events = open(  # noqa: SIM115 (held as long as the run)
            self.run_dir / "events.jsonl", "a", encoding="utf-8", errors="backslashreplace"
        )
        was = {"earlier_status": log_files.fate(earlier)} if earlier else {}
        self.event("resume" if earlier else "start", size=world.size, config=config, **was)

    def path(self, *parts: str) -> Path:
        """Returns a path within the run directory, the same on every rank; does not create it."""
        return self.run_dir.joinpath(*parts)

    def event(self, kind: str, **fields: Any) -> None:
        """Writes one event on rank 0; does nothing on other ranks."""
        with self._writing:
            if self._events is not None:
                self._guarded(self._write_event, kind, fields)

    def checkpoint(self, fields: Mapping[str, Any]) -> None:
        """Writes the event of a save; any thread may call it. `fields`: step, epoch; blocked_s: seconds that training
        waited; sealed_s: seconds until it was on disk, None if it failed; otherwise also bytes and path."""
        self._saves.append(fields)
        self.event("checkpoint", **fields)

    def before_end(self, wait: Callable[[], object]) -> None:
        """Has a run that ends well call `wait()` first: what comes then is still in its record."""
        self._before_end = wait

    def _write_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        assert self._events is not None
        whole = {"time": round(time.time(), 3), "kind": kind, **fields}
        self._events.write(log_files.to_json(whole) + "\n")
        since = time.monotonic()
        if kind != "step" or since - self._last_flush >= FLUSH_EVERY_S:
            self._flush()
            self._last_flush = since

    def _flush(self) -> None:
        for file in (self._events, self._board):
            if file is not None:
                self._guarded(file.flush)

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
        """Records one update. Call it after every update, on every rank: it is cheap.

        Args:
            step: updates done, including this one.
            epoch: counted from 0.
            samples_seen: samples of all ranks since the start of training.
            loss, lr: of this update; None if unknown.
            samples: samples of all ranks in this update.
            seconds: phase name (see `clock`) to this rank's seconds, for example {"input": 0.01, "forward": 0.2}.
        """
        if self._gpus is not None:
            self._gpus.start()  # what came before the first step is no training
        self._take_over()
        self._add_phases(seconds)
        if self._first_step is None:
            self._first_step = dict(self._phase_totals)
        position = {"step": step, "epoch": epoch, "samples_seen": samples_seen, "lr": lr}
        if self._events is not None and self._window.add(position, loss, samples, seconds):
            self._end_window()

    def epoch(
        self, epoch: int, metrics: Mapping[str, float], seconds: float, phases: Mapping[str, float] | None = None
    ) -> None:
        """Records the end of an epoch, with every rank's seconds by phase and GPUs; collective.

        Args:
            epoch: counted from 0.
            metrics: of all ranks together, by name.
            seconds: wall-clock seconds of the epoch.
            phases: this rank's seconds by phase since the last `step`: evaluation, checkpoint.

        Raises:
            ConfigError: a metric is not one number.
        """
        for name, value in metrics.items():
            if not _is_number(value):
                raise ConfigError("an epoch's metric must be a number", f"{name}={value!r}", f"event(..., {name}=...)")
        self._add_phases(phases or {})
        reading = self._gpus.take() if self._gpus is not None else {}
        gathered = self.world.gather((self._phase_totals, self._first_step, reading))
        self._take_over()
        per_rank, first, readings = map(list, zip(*gathered, strict=True))
        self._phase_totals, self._first_step = {}, {}
        self._end_window()
        self._window.spend(phases or {})  # the events of steps sum to the time of the run, too
        more: dict[str, Any] = {"gpus": readings} if any(readings) else {}
        if any(first):
            more["first_step"] = [its or {} for its in first]
        self.event("epoch", epoch=epoch, metrics=dict(metrics), seconds=seconds, ranks=per_rank, **more)
        self._epochs.append({"kind": "epoch", "ranks": per_rank, **more})
        self._say_once_if_unknown(readings)
        if self._line is not None:
            self._line.epoch(epoch, metrics, seconds)
        self._add_scalars({f"epoch/{name}": value for name, value in metrics.items()}, epoch)

    def _say_once_if_unknown(self, readings: list[dict[str, Any]]) -> None:
        failed = {rank: reading["error"] for rank, reading in enumerate(readings) if "error" in reading}
        if failed and self._talks and not self._warned_of_gpus:
            self._warned_of_gpus = True
            rank, error = next(iter(failed.items()))
            log_files.say(f"hvdtrain: no utilisation of GPUs: NVML on rank {rank} reports {error}", sys.stderr)

    def _add_phases(self, seconds: Mapping[str, float]) -> None:
        for phase, value in seconds.items():
            if math.isfinite(value):
                self._phase_totals[phase] = self._phase_totals.get(phase, 0.0) + value

    def _end_window(self) -> None:
        """Writes the steps that are in no event yet."""
        if self._events is None or not self._window.steps:
            return
        fields = self._window.take()
        self.event("step", **fields)
        if self._line is not None:
            self._line.show(fields)
        self._add_scalars({f"train/{name}": fields[name] for name in ("loss", "lr", "samples_per_s")}, fields["step"])

    def _add_scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        if self._board is not None:
            known = {name: float(value) for name, value in scalars.items() if value is not None}
            self._guarded(self._board.add, known, step)

    def result(self, **fields: Any) -> None:
        """Merges `fields` into the result in run.json on rank 0; does nothing on other ranks.

        Raises:
            ConfigError: the run has ended; another run may use its directory.
        """
        if self._ended:
            raise ConfigError("run.result() must come before the end of the run", f"{sorted(fields)}, after finish()")
        self._add_result(fields)

    def _add_result(self, fields: Mapping[str, Any]) -> None:
        if self._events is not None:
            self._update(result={**self._run["result"], **fields})

    def _update(self, **fields: Any) -> None:
        self._run.update(log_files.plain(fields))
        self._guarded(log_files.write_json, self.run_dir / "run.json", self._run)

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Writes how the run ended, with the verdict, and releases the directory; a second call does nothing."""
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # a forked child, whose parent goes on
        self._take_over()
        if self._gpus is not None:
            self._gpus.stop()
        self._ended = True
        if self._events is None:
            return
        if self._before_end is not None and status in ("finished", "preempted"):
            self._before_end()
        self._end_window()
        if self._phase_totals and (self.world.size == 1 or not any(map(any, (its["ranks"] for its in self._epochs)))):
            self._epochs.append({"kind": "epoch", "ranks": [self._phase_totals]})  # what no epoch has closed
        found = verdict(phases_per_rank(self._epochs) or [{}], self.facts)
        text = "\n".join(filter(None, [str(found), gpu.summary(epoch.get("gpus", ()) for epoch in self._epochs)]))
        measured = status == "finished" and found.kind != "unknown"
        if measured:
            self._add_result({"verdict": text, "shares": found.shares})
        if self._saves:
            self._update(checkpoints=stats.of_saves(self._saves))
        self.event("end", status=status, error=error)
        self._update(status=status, error=error, ended=log_files.now())
        self._close()
        if measured and self._talks:
            log_files.say(f"verdict: {text}")

    def _at_exit(self) -> None:
        """Records how a program ended that did not call `finish`."""
        error = ended_by() or (Preempted() if Preempted.seen else None)
        self.__exit__(type(error) if error is not None else None, error, None)

    def _guarded(self, write: Any, *args: Any) -> None:
        """Writes; what cannot be written (disk full, file server gone) is reported once and does not end training."""
        try:
            write(*args)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log_files.say(f"hvdtrain: the run log in {self.run_dir} is incomplete: {error}", sys.stderr)

    def _close(self) -> None:
        """Releases files and lock; the lock last, so that the next run finds everything written."""
        if self._line is not None:
            self._line.close()
        with self._writing:
            for resource in (self._board, self._events, self._lock):
                if resource is not None:
                    self._guarded(resource.close)
            self._line = self._board = self._events = self._lock = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        if exc is None or (isinstance(exc, SystemExit) and exc.code in (None, 0)):
            self.finish()
        elif isinstance(exc, Preempted):
            self.finish("preempted")
        else:
            self.finish("failed", f"{type(exc).__name__}: {exc}")


def _flush_all() -> None:
    """Flushes all run logs before a fork: a forked child that exits would write a buffer's content again."""
    for log in list(_LOGS):
        log._flush()


os.register_at_fork(before=_flush_all)


def run_status(run_dir: str | os.PathLike[str]) -> str | None:
    """Returns "running", "finished", "failed", "preempted" or "killed" (no process holds the run); None: no run."""
    run = read_run(run_dir)
    if run is None or run.get("status") != "running":
        return None if run is None else str(run.get("status"))
    return "killed" if log_files.locked_by(Path(run_dir)) is None else "running"


def _is_number(value: Any) -> bool:
    """Returns True for a number of any framework, and for None, which stands for an unknown number."""
    try:
        return value is None or (not isinstance(value, (str, bytes)) and isinstance(float(value), float))
    except (TypeError, ValueError, RuntimeError):
        return False
