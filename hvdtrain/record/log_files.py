"""A run's files, written by rank 0: strict JSON, replaced atomically, readable after a kill; and TensorBoard's."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.core.errors import ConfigError
from hvdtrain.record.bottleneck import BETWEEN

_MOVE = "give another run directory, or move this one away"


def read_run(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns run.json, or None if there is none; raises ConfigError if it is none of ours."""
    path = Path(run_dir) / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError("run.json must be a file that can be read", f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError("run.json must be JSON", f"{path}: {error}", _MOVE) from None
    if not isinstance(run, dict):
        raise ConfigError("run.json must hold an object", f"{path}: {type(run).__name__}")
    attempts = run.get("attempts")
    if attempts is not None and not (isinstance(attempts, list) and all(isinstance(its, dict) for its in attempts)):
        raise ConfigError("run.json must list its attempts, an object each", f"{path}: {attempts!r:.200}", _MOVE)
    return run


def read_events(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the events in order; a line that a killed process left half-written is not one, nor is what others wrote
    under the name of one of ours.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = Path(run_dir) / "events.jsonl"
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")  # text may hold other characters that end a line for str.splitlines
    except OSError as error:
        raise ConfigError("events.jsonl must be a file that can be read", f"{path}: {error.strerror}") from None
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # half a line; UnicodeDecodeError, where it ends within a character
            continue
        if _is_event(event):
            events.append(event)
    return events


def _is_event(event: Any) -> bool:
    """Returns True if an event has the fields, of the right types, that readers of a log rely on."""
    if not isinstance(event, dict) or not _is_finite(event.get("time", 0.0)):
        return False
    wanted = _FIELDS.get(event.get("kind", ""), {}) if isinstance(event.get("kind", ""), str) else None
    if wanted is None or not all(isinstance(event.get(name), its) for name, its in wanted.items()):
        return False
    ranks = event["ranks"] if event.get("kind") == "epoch" else []
    spent = [event.get("seconds", {}) if event.get("kind") == "step" else {}, *ranks]
    return all(isinstance(its, dict) and all(map(_is_finite, its.values())) for its in spent)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and -1e15 < value < 1e15


def end_last_line(path: Path) -> None:
    """A killed process can leave half a line: end it, so that the next event starts on its own."""
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` by `value` as JSON: readers see the old or the new text, whatever happens in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # names of files that are not UTF-8 reach Python as lone surrogates, for which JSON has an escape
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(to_json(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns strict JSON of nearly anything: see `plain`."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def plain(value: Any) -> Any:
    """Returns `value` as JSON types: arrays and scalars of any framework as lists and numbers, dataclasses as
    objects, the rest as text; NaN and infinities, which JSON lacks, as "nan", "inf", "-inf"."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return plain(value.item()) if hasattr(value, "item") else str(value)


# without a terminal the progress is a line in a log: rarer
LINE_EVERY_S = 5.0
# steps that end within this time share one event and one refresh of the progress line
EVENT_EVERY_S = 0.1
# of events that are drawn and added up: what they hold at least
_FIELDS: dict[str, dict[str, type]] = {
    "step": {"step": int, "seconds": dict},
    "epoch": {"epoch": int, "ranks": list},
}
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class Window:
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
        """Adds a step and returns True if an event is due; a micro-batch without an update adds only seconds."""
        self.steps += samples > 0 or loss is not None
        self._position = position
        self._samples += samples
        if loss is not None:
            self._losses.append(float(loss))
        self.spend(seconds)
        return self.steps > 0 and time.perf_counter() >= self._due

    def spend(self, seconds: Mapping[str, float]) -> None:
        """Adds seconds by phase."""
        for phase, value in seconds.items():
            if math.isfinite(value):
                self._seconds[phase] = self._seconds.get(phase, 0.0) + float(value)

    def take(self) -> dict[str, Any]:
        """Returns the fields of one event over the steps since the last one, and begins a new window."""
        ended = time.perf_counter()
        # the steps' own time, where the caller measures it: validation and checkpoints lie between two windows
        elapsed = sum(value for phase, value in self._seconds.items() if phase not in BETWEEN) or ended - self._since
        fields = {
            **self._position,
            "steps": self.steps,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "samples": self._samples,
            "samples_per_s": self._samples / max(elapsed, 1e-9),
            "seconds": self._seconds,
        }
        self._since, self._due = ended, ended + EVENT_EVERY_S
        self._reset()
        return fields


class Line:
    """The progress line: tqdm on a terminal, else now and then a plain line.

    Its rate is that of all steps since the line before: a window alone may be the one step that follows a pause. The
    first line has none: its step compiles.
    """

    def __init__(self, total_samples: int | None) -> None:
        self._bar: Any = None
        self._due = 0.0
        self._speed = ""
        self._samples = self._elapsed_s = 0.0
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_samples, unit=" samples", unit_scale=True, dynamic_ncols=True, leave=False)

    def show(self, fields: Mapping[str, Any]) -> None:
        self._samples += fields["samples"]
        self._elapsed_s += fields["samples"] / fields["samples_per_s"] if fields["samples_per_s"] else 0.0
        due = time.monotonic() >= self._due
        if due:
            first, self._due = self._due == 0, time.monotonic() + LINE_EVERY_S
            rate = f"  {self._samples / self._elapsed_s:,.0f} samples/s" if self._elapsed_s else ""
            self._speed = "" if first else rate
            self._samples = self._elapsed_s = 0.0
        text = f"epoch {fields['epoch'] + 1} step {fields['step']}"
        for name in ("loss", "lr"):
            text += f"  {name} {fields[name]:.4g}" if fields[name] is not None else ""
        text += self._speed
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.n = fields["samples_seen"]
            self._bar.refresh()
        elif due:
            say(text)

    def epoch(self, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        text = f"epoch {epoch + 1} done in {seconds:.1f} s  {numbers}"
        if self._bar is not None:
            self._bar.write(text)
        else:
            say(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line; ignores a closed pipe or a full disk, which must not end a training."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(text, file=stream, flush=True)


def lock(folder: Path) -> TextIO:
    """Takes a run directory until the process ends; raises ConfigError if another one has it."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    file = open(descriptor, "r+", encoding="utf-8")  # noqa: SIM115 (held as long as the run)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(file)
        file.close()
        raise ConfigError(
            "a run directory cannot be used by two runs at once",
            f"{folder} is in use by {owner}",
            "give another run directory, or end that run first",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            file.close()
            raise
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()} since {now()}\n")
    file.flush()
    return file


def _owner(file: TextIO) -> str:
    """Returns the process that has locked a file: the one named in it, or a process that this one has started."""
    text = file.read().strip() or "an unknown process"
    words = text.split()  # pid 123 on host since 2026-...
    here = len(words) > 3 and words[3] == socket.gethostname()
    gone = here and words[1].isdecimal() and not Path(f"/proc/{words[1]}").exists()
    return f"a process that was started by {text}, which has ended" if gone else text


def locked_by(folder: Path) -> str | None:
    """Returns the process that has taken a directory by `lock`, or None if no process has."""
    try:
        with open(folder / ".lock", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _owner(file)
    except OSError:  # no lock there (a copy of a run), or a file system without locks
        pass
    return None


def fate(earlier: Mapping[str, Any]) -> str:
    """Returns how an earlier run ended, whose directory this process has locked: a status "running" means killed."""
    return "killed" if earlier.get("status") == "running" else str(earlier.get("status"))


def effective_batch(config: Mapping[str, Any], size: int) -> int | None:
    if "global_batch" in config:
        return config["global_batch"]
    if "per_rank_batch" in config:
        return config["per_rank_batch"] * size * (config.get("accumulate") or 1)
    return None


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class ScalarWriter:
    """Appends scalars to a new event file in `folder`; needs the `tensorboard` package."""

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
        """Writes scalars of one step; names with a slash are grouped by what comes before it."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()
