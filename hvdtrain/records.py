"""A run's files: strict JSON, replaced atomically, readable after a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError


def read_run(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return run.json, or None if there is none.

    Raises:
        ConfigError: it is not JSON.
    """
    path = Path(run_dir) / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            "run.json must be JSON", f"{path}: {error}", "move the file away, or give another run directory"
        ) from None
    if not isinstance(run, dict):
        raise ConfigError("run.json must hold an object", f"{path}: {type(run).__name__}")
    return run


def read_events(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events in order; a line that a killed process left half-written is not one."""
    path = Path(run_dir) / "events.jsonl"
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().split(b"\n"):  # text may hold other characters that end a line for str.splitlines
        try:
            events.append(json.loads(line))
        except ValueError:  # half a line; UnicodeDecodeError, where it ends within a character
            continue
    return events


def end_last_line(path: Path) -> None:
    """A killed process can leave half a line: end it, so that the next event starts on its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: readers see the old or the new text, whatever happens in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(to_json(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON of nearly anything: see `plain`."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def plain(value: Any) -> Any:
    """Return `value` as JSON types: arrays and scalars of any framework as lists and numbers, dataclasses as
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
