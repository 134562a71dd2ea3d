"""`hvdtrain why`: the newest hang, else how the run ended and what killed ranks have left."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from hvdtrain import __main__
from hvdtrain.comm import ring
from hvdtrain.comm.ring import FOLDER, UPDATE, open_ring
from hvdtrain.commands.why import pages_in_words, why
from hvdtrain.core.errors import RanksLost
from hvdtrain.record.log_files import write_json


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
    assert (
        said.startswith(f"{tmp_path}: no end is recorded\nranks that ended without a message: killed (")
        and "40 update(s) done, in an update, in phase forward" in said
    )
    assert why(tmp_path / FOLDER / "rank-0.ring").count("update(s) done") == 1


def test_who_fell_silent_first() -> None:
    pages = [
        {"rank": rank, "host": "node", "updates": 5, "steps": 4, "in": "", "time": 1000.0 - 9 * rank}
        for rank in range(3)
    ]
    assert pages_in_words(pages).startswith("rank 2 fell silent first, and is likely the cause\n  rank 2")
    assert pages_in_words(pages).count(": 4 update(s) done") == 3  # a proof's is none of the training
    assert "(by its own host's clock)" in pages_in_words([pages[0], {**pages[1], "host": "other"}])
    assert pages_in_words([{**page, "time": 5.0} for page in pages]).startswith("ranks that ended without a message")


def fails(folder: Path, rank: int, error: BaseException, at: float | None = None) -> None:
    """A rank that ends with an error; at: when."""
    with pytest.MonkeyPatch.context() as patch:
        if at is not None:
            patch.setattr(time, "time", lambda: at)
        ring.last_words(open_ring(folder, "token", rank), folder, rank, error, ends=True)


def falls_silent(folder: Path, rank: int, at: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: at)
        page = open_ring(folder, "token", rank)
        assert page is not None
        page.tell({"rank": rank, "host": "node", "pid": 7})


def raised(error: Exception) -> Exception:
    try:
        raise error  # here
    except Exception as caught:
        return caught


LOST = RanksLost("every rank must take part until the end", "Horovod gave up", "read what the rank has said")


def test_the_error_of_another_rank_comes_before_what_came_of_it(tmp_path: Path) -> None:
    begun(tmp_path, error=f"RanksLost: {LOST}")
    assert why(tmp_path).endswith(f"received: RanksLost: {LOST}".replace("\n", "\n" + " " * 12)), "nobody else is known"
    fails(tmp_path, 1, raised(RuntimeError("boom")), at=1000.0)
    lines = why(tmp_path).splitlines()
    assert lines[0].startswith(f"{tmp_path}: failed") and re.match(r"  received: rank 1 \(host \S+, process", lines[1])
    assert lines[1].endswith(": RuntimeError: boom") and lines[2].split(maxsplit=2)[0] == "at" and "# here" in lines[2]
    assert lines[3:] == ["  after it: rank 0: RanksLost: every rank must take part until the end"]
    assert why(tmp_path / FOLDER / "rank-1.ring") == "\n".join(lines[1:3])


def test_the_first_error_that_is_not_of_another_ranks_is_told(tmp_path: Path) -> None:
    begun(tmp_path, "running")
    wrapped = raised(ValueError("training failed"))
    wrapped.__context__ = LOST
    fails(tmp_path, 0, wrapped, at=900.0)
    fails(tmp_path, 1, KeyError("later"), at=1000.1)
    fails(tmp_path, 2, SystemExit(3), at=1000.0)
    fails(tmp_path, 3, KeyError("later"), at=1000.2)
    falls_silent(tmp_path, 4, at=999.0)
    said = why(tmp_path)
    assert [line.split("process")[0].strip() for line in said.splitlines()[1:3]] == [
        f"received: rank 2 (host {socket.gethostname()},", f"then rank 1 (host {socket.gethostname()},",
    ]  # fmt: skip
    assert said.count("later") == 1 and "SystemExit: 3" in said
    assert said.splitlines()[3:] == [
        "  after it: rank 0: ValueError: training failed",
        "  after it: rank 4 ended without a message: a launcher ends the others",
    ]
    falls_silent(tmp_path, 5, at=990.0)
    assert [line.split(": ")[0] for line in why(tmp_path).splitlines()[1:3]] == [
        "ranks that ended without a message", "  rank 5 (host node, process 7)",
    ]  # fmt: skip


def test_a_rank_that_ended_without_a_word_comes_before_what_came_of_it(tmp_path: Path) -> None:
    begun(tmp_path, error=f"RanksLost: {LOST}")
    falls_silent(tmp_path, 1, at=1000.0)
    lines = why(tmp_path).splitlines()
    assert "by os._exit, or by a crash of native code" in lines[1] and lines[2].startswith("  rank 1 (host node")
    assert lines[3:] == ["  after it: rank 0: RanksLost: every rank must take part until the end"]


def test_an_error_before_a_hang_is_told_first(tmp_path: Path) -> None:
    """Of a rank whose threads have kept its process, say."""
    begun(tmp_path, "running", age_s=60)
    fails(tmp_path, 1, ValueError("mine"))
    fails(tmp_path, 2, LOST)
    fails(tmp_path, 3, ValueError("much later"), at=time.time() + 9)
    hang(tmp_path / FOLDER, "a.json", "rank 1", age_s=-1)
    lines = why(tmp_path).splitlines()
    assert "ValueError: mine" in lines[0] and "a.json" in lines[1] and "received: rank 1" in lines[3]
    assert not any("later" in line or "RanksLost" in line for line in lines)


def test_a_job_that_was_preempted_has_a_signal_or_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = tmp_path / "run", tmp_path / "launch-1"
    run.mkdir()
    folder.mkdir()
    begun(run, "preempted")
    write_json(folder / "launch.json", {"attempts": [{"exit_code": 85, "failure": None}]})
    for where in (run, folder):
        assert __main__.main(["why", str(where)]) == 1 and "are not recorded here" in capsys.readouterr().out
    saved = "hvdtrain: preempted: nothing was saved, x; exit code 85"
    (folder / "rank-0001.log").write_text(f"hvdtrain: rank 1 got SIGUSR1: after the next update\n{saved}\n")
    assert __main__.main(["why", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "the job was preempted: rank 1 got SIGUSR1; preempted: nothing was saved" in said
