"""A checkpoint's files: its manifest (size and checksum of every file, and a digest of itself), and how ranks on other
hosts get them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.world.world import World

MANIFEST = "manifest.json"
# how metrics are called that are better when they are greater, and when they are less; without "val_" and numbers at
# the end ("top1", "auc_2")
_GREATER = re.compile(
    r"(.+_)?(acc(uracy)?|auc|auroc|top(_?k|_?\d+)?|precision|recall|sensitivity|specificity|f(beta|\d)?(_score)?|dice"
    r"|m?iou|io_u|jaccard|m?ap|bleu|rouge|r_?2(_score)?|psnr|ssim|ndcg|mrr|cosine_similarity|correlation|likelihood)"
)
_LESS = re.compile(
    r"(.+_)?(loss|err(or)?(_rate)?|mse|mae|rmse|mape|msle|nll|perplexity|ppl|(cross_?)?entropy|(kl_)?divergence|hinge"
    r"|log_?cosh|poisson|wer|cer|fid|distance|false_(positives|negatives))"
)
_TURNED = re.compile(r"(.+_)?(neg|negative|minus|inverse|one_minus)_")  # means the opposite of the rest


Sealed = dict[str, Any]  # {"bytes": size, "sha256": checksum}
LAYOUT = 1  # what the manifest gives as "format"


def seal(file: StateFile) -> Sealed:
    """Forces a file to disk, and returns its size and checksum."""
    os.fsync(file.fileno())
    with open(file.path, "rb") as written:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": _sha256(written)}


def _sha256(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    text = json.dumps({**body, "digest": _digest(body)}, indent=1, allow_nan=False)
    with StateFile.on_disk(path) as file:
        file.write(text.encode())
        os.fsync(file.fileno())


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest; raises CheckpointError if damaged, ConfigError for another version's format."""
    text = (path / MANIFEST).read_bytes()
    try:
        body = json.loads(text)
        digest = body.pop("digest")
        whole = digest == _digest(body) and {"format", "progress", "metrics", "files"} <= set(body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # not JSON, or JSON of something else
        whole = False
    if not whole:
        raise CheckpointError("a manifest must match its digest", f"{path / MANIFEST} is damaged")
    if body["format"] != LAYOUT:
        raise ConfigError(
            f"a checkpoint of this hvdtrain must have format {LAYOUT}",
            f"format {body['format']}",
            "install a newer hvdtrain",
        )
    body["metrics"] = {name: float(value) for name, value in body["metrics"].items()}
    return body


def verify(folder: Path, files: Mapping[str, Sealed]) -> None:
    """Raises CheckpointError (or OSError) unless every file has its size and checksum."""
    for name, sealed in files.items():
        with open(folder / name, "rb") as file:
            if os.fstat(file.fileno()).st_size != sealed["bytes"] or _sha256(file) != sealed["sha256"]:
                raise CheckpointError("a file must match its checksum", f"{name} is damaged")


def sync_directory(path: Path) -> None:
    """Forces a directory's entries to disk: a rename is not durable before that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def direction_of(metric: str) -> Literal["min", "max"]:
    """Returns the better direction of a metric of this name; raises ConfigError if the name does not show it."""
    name = metric.lower().removeprefix("val_").removeprefix("test_")
    bare = re.sub(r"_?\d+$", "", name)
    greater, less = (any(kind.fullmatch(form) for form in (name, bare)) for kind in (_GREATER, _LESS))
    if greater == less or _TURNED.match(name):
        raise ConfigError(
            "the best checkpoint needs to know which way its metric is better",
            f"best={metric!r}, a name that does not show it",
            f'Checkpointer(..., best={metric!r}, mode="max") where more is better, else mode="min"',
        )
    return "max" if greater else "min"


CHUNK_BYTES = 64 << 20


@contextmanager
def local_copy(
    world: World, path: Path, files: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[Path, Exception | None]]:
    """Gives a folder with the files, sent by rank 0 where they are missing, and what failed: all ranks continue."""
    here = world.is_main or has_files(path, files)
    folder = path
    failure: Exception | None = None
    try:
        folder = path if here else Path(tempfile.mkdtemp(prefix="hvdtrain-"))
    except OSError as error:
        failure = error
    try:
        if not all(world.gather(here)):
            for name, sealed in files.items():
                target = None if here or failure else folder / name
                failure = _send(world, path / name, target, sealed["bytes"]) or failure
            if not here and failure is None and not has_files(folder, files):
                failure = CheckpointError("every rank must get the bytes that rank 0 has", "they arrived damaged")
        yield folder, failure
    finally:
        if folder != path:
            shutil.rmtree(folder, ignore_errors=True)


def _send(world: World, source: Path, target: Path | None, size_bytes: int) -> Exception | None:
    """Sends a file from rank 0 to ranks with a `target`, in chunks; a rank that fails keeps taking part."""
    failure: Exception | None = None
    for start in range(0, max(1, size_bytes), CHUNK_BYTES):  # an empty file is one chunk too
        data = b""
        try:
            if world.is_main:
                with open(source, "rb") as file:
                    file.seek(start)
                    data = file.read(CHUNK_BYTES)
        except OSError as error:
            failure = error
        data = world.comm.broadcast_bytes(data, 0)
        try:
            if target is not None and failure is None:
                with open(target, "ab") as file:
                    file.write(data)
        except OSError as error:
            failure = error
    return failure


def has_files(path: Path, files: Mapping[str, dict[str, Any]]) -> bool:
    """Returns True if this rank sees the same checkpoint as rank 0."""
    try:
        verify(path, files)
    except (OSError, CheckpointError):
        return False
    return True
