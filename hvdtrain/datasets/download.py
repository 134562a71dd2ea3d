"""Downloads one file: within a time limit, checked against its hash, in place whole or not at all; on one rank of each
node."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets.images import together
from hvdtrain.world.world import World

STALL_AFTER_S = 10.0
WHOLE_WITHIN_S = 600.0


def fill_cache(world: World, target: Path, url: str, sha256: str, size_bytes: int, *, variable: str) -> None:
    """Downloads a published file to `target` unless it is there; collective: one rank of each node does so.

    The environment's `variable` may name a mirror, whose file must have the same hash.
    """

    def work() -> None:
        if target.is_file() or world.local_rank > 0:
            return
        source = os.environ.get(variable) or url
        print(f"downloading {source} ({size_bytes / 1e6:.0f} MB) to {target}", flush=True)
        remedy = (
            f"train on --data digits (built in, no network); copy {target.name} there, or name one with --data PATH;\n"
            f"behind a proxy set https_proxy; for a mirror of your own set {variable}"
        )
        download(source, target, sha256, size_limit_bytes=2 * size_bytes, remedy=remedy)

    together(world, work)


def download(url: str, target: Path, sha256: str, *, size_limit_bytes: int, remedy: str) -> None:
    """Puts the file at `url` to `target` if its SHA-256 is `sha256`. Proxies come from the environment.

    Raises:
        ConfigError: with `remedy`: no network, no answer, no room or another hash. `target` is as it was before.
    """
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the rename stays in one file system; unique, so that two nodes
        # that share the folder do not write into one file
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        partial = Path(name)
        with os.fdopen(handle, "wb") as output, urllib.request.urlopen(url, timeout=STALL_AFTER_S) as answer:
            found = _copy(answer, output, size_limit_bytes)
            output.flush()
            os.fsync(output.fileno())
        if found != sha256:
            raise ConfigError(f"{url} does not have the expected SHA-256", f"{found}\nexpected: {sha256}", remedy)
        partial.chmod(0o644)  # mkstemp makes files private; a cache is shared
        partial.replace(target)
    except (OSError, HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        rule = f"{url} cannot be downloaded to {target}"
        raise ConfigError(rule, f"{type(error).__name__}: {error}", remedy) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)  # it is renamed when all went well


def _copy(answer: Any, output: Any, size_limit_bytes: int) -> str:
    """Copies all of `answer`; returns its SHA-256."""
    digest, copied, end = hashlib.sha256(), 0, time.monotonic() + WHOLE_WITHIN_S
    while block := answer.read(1 << 16):
        copied += len(block)
        if copied > size_limit_bytes:
            raise ValueError(f"more than {size_limit_bytes} bytes came")
        if time.monotonic() > end:
            raise TimeoutError(f"not finished within {WHOLE_WITHIN_S:.0f} s")
        digest.update(block)
        output.write(block)
    return digest.hexdigest()
