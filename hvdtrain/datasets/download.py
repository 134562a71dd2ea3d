"""Downloads a file on one rank of each node, checks its hash, and leaves it whole or not at all."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path
from uuid import uuid4

from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets.images import together
from hvdtrain.world.world import World

STALL_AFTER_S = 10.0


def fill_cache(world: World, target: Path, url: str, sha256: str, *, variable: str) -> None:
    """Downloads a published file to `target` unless it is there; collective: one rank of each node does so.

    The environment's `variable` may name a mirror, whose file must have the same hash. Proxies come from the
    environment.

    Raises:
        ConfigError: on every rank: no network, no answer, no room or another hash. `target` is as it was before.
    """

    def work() -> None:
        if not target.is_file() and world.local_rank == 0:
            _download(os.environ.get(variable) or url, target, sha256, variable)

    together(world, work)


def _download(source: str, target: Path, sha256: str, variable: str) -> None:
    print(f"downloading {source} to {target}", flush=True)
    # beside the target, so that the rename stays in one file system; unique, so that two nodes that share the folder
    # do not write into one file
    partial = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        with urllib.request.urlopen(source, timeout=STALL_AFTER_S) as answer:
            content = answer.read()
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise ValueError(f"its SHA-256 is {found}, expected: {sha256}")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(target)
    except (OSError, HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        raise ConfigError(
            f"{source} cannot be downloaded to {target}",
            f"{type(error).__name__}: {error}",
            f"train on --data digits (built in, no network); copy {target.name} there, or name one with --data PATH;\n"
            f"behind a proxy set https_proxy; for a mirror of your own set {variable}",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
