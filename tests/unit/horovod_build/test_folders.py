"""Folders that wheels are put in: one that cannot be made, or written, is named with the option that gives another."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import horovod_build
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import build, dist, environment

HERE = environment.Environment(
    python="3.11.7", python_tag="cpython-311", machine="x86_64", cpu_flags="avx", torch="2.12.1", torch_cuda=None,
    torch_cxx11=True, tensorflow="2.21.0", cmake="3.25.1", gcc="12.2.0", mpi=None, gpu="none", nccl=None,
)  # fmt: skip
Patch = pytest.MonkeyPatch


def quietly(line: str) -> None:
    """Says nothing."""


def build_into(folder: Path, monkeypatch: Patch) -> None:
    build.build(HERE, sdist=folder / "absent.tar.gz", cache=folder, say=quietly)


def leave_a_copy(option: str, folder: Path, monkeypatch: Patch) -> None:
    """Of a wheel that the cache has."""
    monkeypatch.setattr(environment, "look", lambda gpu, mpi: HERE)
    monkeypatch.setattr(build, "find_cached", lambda cache: Path(__file__))
    monkeypatch.setattr(dist, "make", lambda wheel, found, folder, run: (folder / "made.whl").touch())
    monkeypatch.setattr(dist, "needs", str)
    parser = argparse.ArgumentParser()
    horovod_build.add_arguments(parser)
    horovod_build.run(parser.parse_args([option, str(folder), "--cache", str(folder)]))


WORK: dict[str, Callable[[Path, Patch], None]] = {
    "HVDTRAIN_CACHE=DIR, or --cache DIR": build_into,
    "--output DIR": lambda *its: leave_a_copy("--output", *its),
    "--dist DIR": lambda *its: leave_a_copy("--dist", *its),
}


@pytest.mark.parametrize("remedy", WORK)
def test_a_folder_that_cannot_be_written_is_named(remedy: str, tmp_path: Path, monkeypatch: Patch) -> None:
    file, access = tmp_path / "file", os.access
    file.write_text("mine")
    with monkeypatch.context() as patch:
        # root may write everywhere
        patch.setattr(os, "access", lambda path, mode: access(path, mode) and not (path == tmp_path and mode & os.W_OK))
        wrong = {file: "File exists", file / "below": "Not a directory", tmp_path: "Permission denied"}
        for folder, why in wrong.items():
            with pytest.raises(HvdtrainError, match="a folder that this user can write") as caught:
                WORK[remedy](folder, patch)
            assert caught.value.received == f"{folder}: {why}"
            assert caught.value.remedy == f"give another: {remedy}"
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("remedy", WORK)
def test_a_folder_that_can_be_made_is_made(remedy: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """The twin: what is refused after that is something else."""
    folder = tmp_path / "new" / "below"
    try:
        WORK[remedy](folder, monkeypatch)
    except HvdtrainError as error:
        assert "user can write" not in error.rule, error
    assert list(folder.iterdir())
