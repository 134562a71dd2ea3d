"""The doctor's probe, under every Python of this machine, and the sessions that talk with it; no ssh, no other host."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.cluster.doctor.examine import source
from hvdtrain.cluster.hosts import probe


def test_the_probe_is_plain_old_python() -> None:
    """It is sent as ASCII, and its parts must not import each other or us."""
    text = source()
    assert text.isascii() and "hvdtrain." not in text.replace(".hvdtrain-doctor", "").split("Sent after")[0]
    assert "import probe" not in text and "from hvdtrain" not in text


def test_a_fact_that_never_comes_is_given_up() -> None:
    release = threading.Event()

    def fails() -> None:
        raise PermissionError("no")

    started = time.monotonic()
    answers = probe.ask({"hangs": release.wait, "fails": fails, "works": lambda: 7}, 0.2)
    release.set()
    assert time.monotonic() - started < 5
    assert answers == {
        "hangs": {"unanswered": "no answer in 0.2 s"}, "fails": {"unanswered": "PermissionError: no"}, "works": 7,
    }  # fmt: skip


@pytest.mark.parametrize("distribution", ["horovod", "hvdtrain_horovod"])
def test_horovod_is_known_by_either_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    """The twin: metadata of what is gone."""
    (tmp_path / f"{distribution}-0.28.1+torch2.12cpu.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "horovod" not in probe._packages()
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert probe._packages()["horovod"] == "0.28.1+torch2.12cpu"


def test_what_horovod_was_built_with_is_read_from_its_extension(tmp_path: Path) -> None:
    folder = tmp_path / "horovod" / "torch"
    folder.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "libnccl.so.2").touch()
    file = folder / "mpi_lib_v2.so"
    file.write_bytes(
        b"\x7fELF\0libmpi.so.4711\0libnccl.so.2\0$ORIGIN/../../here:$ORIGIN/../../there\0"
        b"_ZTSN7horovod6common13MPIControllerE\0_ZTSN7horovod6common13NCCLAllreduceE\0"
    )
    assert probe.extension_facts(str(file)) == {
        "mpi": True, "gloo": False, "nccl": True, "needs": ["libmpi.so.4711", "libnccl.so.2"],
        "missing": ["libmpi.so.4711"],
    }  # fmt: skip
