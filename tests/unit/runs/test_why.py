"""`hvdtrain why`: the newest hang, else how the run ended and what killed ranks have left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hvdtrain import __main__
from hvdtrain.commands.why import pages_in_words, why
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.in_step.ring import FOLDER, UPDATE, open_ring
from hvdtrain.runs.log_files import write_json


def hang(folder: Path, name: str, received: str, age_s: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    at = time.time() - age_s
    path.write_text(json.dumps({"rule": "no rank may wait", "received": received, "remedy": "look there", "time": at}))
    os.utime(path, (at, at))
    return path


def begun(folder: Path, status: str = "failed", age_s: float = 0.0, error: str | None = None) -> None:
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age_s))
    write_json(folder / "run.json", {"status": status, "attempts": [{"started": started}], "error": error})


def test_the_newest_hang_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hang(tmp_path / FOLDER, "b.json", "rank 1", age_s=60)
    file = hang(tmp_path / FOLDER, "a.json", "rank 2")
    assert __main__.main(["why", str(tmp_path)]) == 0
    assert "no rank may wait\n  received: rank 2\n  fix: look there" in capsys.readouterr().out
    assert why(tmp_path / FOLDER) == why(tmp_path) == why(file)


def test_a_hang_of_an_earlier_attempt_is_past(tmp_path: Path) -> None:
    hang(tmp_path / FOLDER, "a.json", "rank 2", age_s=600)
    begun(tmp_path, age_s=60, error="ValueError: no")
    (tmp_path / "events.jsonl").write_text('{"time": 1000, "kind": "step", "step": 7, "seconds": {}}\n')
    said = why(tmp_path)
    assert said.startswith(f"{tmp_path}: failed; its last event: step 7") and said.endswith("received: ValueError: no")
    begun(tmp_path, age_s=900)
    assert "rank 2" in why(tmp_path)


def test_pages_of_killed_ranks_are_told(tmp_path: Path) -> None:
    begun(tmp_path, "running")
    for rank in range(2):
        page = open_ring(tmp_path, "token", rank)
        assert page is not None
        page.tell({"rank": rank, "host": "node", "pid": 7, "phase": "forward"})
        page.note(UPDATE, 40 + rank, 3, 40 + rank)
    said = why(tmp_path)
    assert said.startswith(f"{tmp_path}: killed") and "40 update(s) done, in an update, in phase forward" in said
    assert why(tmp_path / FOLDER / "rank-0.ring").count("update(s) done") == 1


def test_who_fell_silent_first() -> None:
    pages = [{"rank": rank, "host": "node", "updates": 4, "in": "", "time": 1000.0 - 9 * rank} for rank in range(3)]
    assert pages_in_words(pages).startswith("rank 2 fell silent first, and is likely the cause\n  rank 2")
    assert "(by its own host's clock)" in pages_in_words([pages[0], {**pages[1], "host": "other"}])
    assert pages_in_words([{**page, "time": 5.0} for page in pages]).startswith("ranks that did not end by themselves")


def test_nothing_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path, "finished")
    assert __main__.main(["why", str(tmp_path)]) == 1 and "nothing tells why" in capsys.readouterr().out
    for wrong in (tmp_path / "none", tmp_path / "run.json"):
        with pytest.raises(ConfigError, match="reads a run's directory"):
            why(wrong)
