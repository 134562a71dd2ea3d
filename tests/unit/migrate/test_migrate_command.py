"""`hvdtrain migrate`: what it prints and writes, and with which exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.migrate.prove import NotProvenError, ScriptProof

SCRIPT = "# -*- coding: latin-1 -*-\r\nimport horovod.torch as hvd\r\nhvd.init()\r\nprint('\xe9', hvd.rank())\r\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(SCRIPT.encode("latin-1"))
    return path


def migrate(*argv: str | Path) -> int:
    return main(["migrate", "--no-prove", *map(str, argv)])


def test_line_ends_and_encoding_stay(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate("-o", tmp_path / "new.py", script) == 0
    new = (tmp_path / "new.py").read_bytes()
    assert b"\r\nworld = hvdtrain.init(\"torch\")\r\nprint('\xe9', world.rank)\r\n" in new and b"\n" not in new.replace(
        b"\r\n", b""
    )
    assert f"--- {script}\n+++ {tmp_path / 'new.py'}\n" in capsys.readouterr().out
    assert script.read_bytes() == SCRIPT.encode("latin-1")


@pytest.mark.parametrize(
    "error, code, wanted",
    [
        (NotProvenError("the new script failed"), 1, "NOT PROVEN: the new script failed"),
        (HvdtrainError("nothing was proven: no data", "", "--no-prove"), 2, "nothing was proven: no data\n  fix: --no"),
        (ScriptProof(20, 4, "w", 1, 0.5, 1e-5), 1, "NOT PROVEN: after 20 updates"),
        (ScriptProof(20, 4, "w", 1, 0.0, 1e-5), 0, "hvdtrain migrate: after 20 updates"),
    ],
)
def test_only_what_was_proven_is_written(
    error: Exception | ScriptProof, code: int, wanted: str, script: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = []

    def proves(path: Path, text: str, argv: list[str], **more: object) -> ScriptProof:
        given.append((path, argv, more["updates"]))
        if isinstance(error, ScriptProof):
            return error
        raise error

    monkeypatch.setattr("hvdtrain.migrate.prove.prove", proves)
    assert main(["migrate", "--updates", "9", "-o", str(tmp_path / "new.py"), str(script), "--epochs", "1"]) == code
    said = capsys.readouterr()
    assert wanted in said.err and "+import hvdtrain" in said.out and given == [(script, ["--epochs", "1"], 9)]
    assert (tmp_path / "new.py").exists() is (code == 0)


def test_in_place_keeps_what_was_there(script: Path) -> None:
    assert migrate("--in-place", script) == 0
    assert script.with_name("train.py.orig").read_bytes() == SCRIPT.encode("latin-1")
    assert b"hvdtrain" in script.read_bytes()


def test_nothing_is_written_over(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new.py").write_text("mine")
    assert migrate("-o", tmp_path / "new.py", script) == 2
    assert (tmp_path / "new.py").read_text() == "mine" and "cannot overwrite a file" in capsys.readouterr().err


def test_refusals_have_file_and_line(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import horovod.torch as hvd\nhvd.join()\n")
    assert migrate("-o", tmp_path / "new.py", script) == 1
    said = capsys.readouterr()
    assert f"{script}:2: ranks with unequal" in said.err and not said.out and not (tmp_path / "new.py").exists()
