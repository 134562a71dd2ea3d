"""Horovod's repository: HVDTRAIN_HOROVOD_SOURCE names a checkout of v0.28.1, or a git directory that has this tag."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

VARIABLE = "HVDTRAIN_HOROVOD_SOURCE"


def taken(part: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with `part`, a folder of the repository, in it; skips the test where there is no repository."""
    given = os.environ.get(VARIABLE)
    if given is None:
        pytest.skip(f"{VARIABLE} does not say where Horovod's repository is")
    folder = tmp_path_factory.mktemp("horovod")
    if (Path(given) / part).is_dir():
        shutil.copytree(Path(given) / part, folder / part)
    else:
        found = subprocess.run(["git", "-C", given, "archive", "v0.28.1", part], stdout=subprocess.PIPE, check=True)
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(folder, filter="data")
    return folder
