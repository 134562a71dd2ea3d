"""Ranks that are not in step are told where each is, within 10 s, and end; slow ones are left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from watched_pair import Ended

from hvdtrain.comm.engines import SoloEngine
from hvdtrain.comm.lines import user_line
from hvdtrain.comm.ring import FOLDER
from hvdtrain.commands.why import why
from hvdtrain.core import variables
from hvdtrain.core.errors import OUT_OF_STEP_CODE, ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.watch import watch
from hvdtrain.watch.meeting import END, State, Tracker, deadlocked, described, out_of_step

LEFT = "collective calls are not allowed after the rank has left its world"


# -- pure ----------------------------------------------------------------------------------------------------------
def state(kind: str, number: int, *, updates: int = 0, meetings: int = 0, key: str = "", line: str = "a.py:1") -> State:
    return {"kind": kind, "number": number, "key": key, "line": line, "updates": updates, "meetings": meetings}


def update(number: int, meetings: int = 0, key: str = "") -> State:
    return state("update", number, updates=number - 1, meetings=meetings, key=key)


def gather(number: int, updates: int = 0) -> State:
    return state("gather", number, updates=updates, meetings=number - 1)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([update(3), gather(1, updates=2)], True),
        ([update(3), update(3), gather(1, updates=2)], True),
        ([update(3, key="of model 1"), update(3, key="of model 2")], True),
        ([update(3), update(3)], False),  # slow, together
        ([gather(4), gather(4)], False),
        ([update(3), gather(1, updates=3)], False),  # the second has sent all that the first still receives
        ([gather(2), update(1, meetings=2)], False),
        ([update(3), update(4)], False),
        ([gather(2), gather(2), update(1, meetings=2)], False),
    ],
)
def test_who_waits_in_vain(states: list[State], expected: bool) -> None:
    assert deadlocked(states) is expected
    assert deadlocked(states[::-1]) is expected


def test_the_error_names_every_rank_and_folds_equal_ones() -> None:
    error = out_of_step([update(3), gather(1, updates=2), gather(1, updates=2)])
    assert error.received.splitlines() == [
        "rank 0: in update 3: a.py:1",
        "ranks 1-2: in gather, after 2 update(s): a.py:1",
    ]
    assert error.shared and error.remedy


def test_the_first_advice_is_for_what_happened() -> None:
    left: State = {**gather(1, updates=2), "kind": END}
    assert out_of_step([update(3), left]).remedy.startswith("break and continue on every rank alike")
    assert out_of_step([update(3), gather(1, updates=2)]).remedy.startswith("call collective functions")


def test_an_update_is_counted_from_the_first_of_the_training() -> None:
    """The tracker also counts the proof's."""
    assert described({**update(5), "updates": 4, "steps": 3}) == "in update 4: a.py:1"


def test_a_frame_that_is_at_no_line() -> None:
    """As another thread's is for a moment: the watch goes on."""
    code = test_a_frame_that_is_at_no_line.__code__
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_globals=globals(), f_back=None)
    assert user_line(frame) == f"test_in_step.py:{code.co_firstlineno}: def test_a_frame_that_is_at_no_line() -> None:"


def test_after_the_end_nothing_is_collective() -> None:
    tracker, alone = Tracker(0, 2), Tracker()
    for each in (tracker, alone):
        each.leave()
    with pytest.raises(ConfigError, match=LEFT), tracker.meeting(SoloEngine(), "gather"):
        pass
    with alone.meeting(SoloEngine(), "gather") as total:
        assert total == 0.0


# -- two trackers of one process, real sockets ---------------------------------------------------------------------
class Pair(Ended):
    """Ranks 0 and 1, watched; `ended` is what each would have printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, also: Sequence[str] = ()) -> None:
        super().__init__(monkeypatch, OUT_OF_STEP_CODE)
        detected = Detected("mpirun", 0, 2, 0, 2, 0, None)
        listener, self.where = watch.listen(detected, {variables.IN_STEP_S: "0.2"})
        if also:
            self.where = dataclasses.replace(self.where, addresses=(*also, *self.where.addresses))
        self.ranks = [watch.start(rank, 2, self.where, listener if rank == 0 else None) for rank in range(2)]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    found = Pair(monkeypatch)
    yield found
    for rank in found.ranks:
        rank.close()


def test_ranks_that_wait_for_each_other_are_both_told(pair: Pair) -> None:
    assert pair.where.addresses == ("127.0.0.1",)
    pair.ranks[0].begin_update("of model 1")
    pair.ranks[1].begin_update("of model 2")
    assert pair.over.wait(30)
    assert pair.ended[0] == pair.ended[1]
    lines = pair.ended[0][1].splitlines()
    assert [line[:30] for line in lines] == ["rank 0: in update 1 of model 1", "rank 1: in update 1 of model 2"]
    assert all("test_in_step.py" in line for line in lines)


def test_what_ranks_out_of_step_have_said_is_kept_in_the_run(pair: Pair, tmp_path: Path) -> None:
    for rank in pair.ranks:
        rank.use_run_dir(tmp_path)
    pair.ranks[0].begin_update("of model 1")
    pair.ranks[1].begin_update("of model 2")
    assert pair.over.wait(30)
    (file,) = (tmp_path / FOLDER).iterdir()
    assert pair.ended[0][1].replace("\n", "\n" + " " * 12) in why(tmp_path)
    assert [its["at"]["key"] for its in json.loads(file.read_text())["ranks"]] == ["of model 1", "of model 2"]
    pair.ranks[1].fails(ValueError("the engine broke"))
    assert list((tmp_path / FOLDER).iterdir()) == [file], "it comes of it"


def test_another_program_at_an_address_that_looks_like_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the other rank's own host, at the port by chance; and one address leads to rank 0 by another way."""
    pair = Pair(monkeypatch, ["127.0.0.2", "127.0.0.3", "127.0.0.4", "nowhere.invalid", "127.0.0.1"])
    port = pair.where.port
    with socket.create_server(("127.0.0.2", port)), socket.create_server(("127.0.0.3", port)) as other:
        pair.ranks[0].begin_update("of model 1")
        pair.ranks[1].begin_update("of model 2")
        with other.accept()[0] as link:  # the first one is accepted by the kernel, and silent
            link.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            over = pair.over.wait(30)
    for rank in pair.ranks:
        rank.close()
    assert over


def test_a_rank_outside_of_collectives_is_not_accused(pair: Pair) -> None:
    pair.ranks[0].begin_update("of model 1")
    assert not pair.over.wait(1.5) and not pair.ended  # 7 times as long as a rank may be in one place


def test_a_rank_that_does_not_answer_any_more_is_not_accused(pair: Pair) -> None:
    """It was stopped after it had reported: where it is now, nobody knows."""
    with socket.create_connection((pair.where.addresses[0], pair.where.port)) as old:
        for message in ({"token": pair.where.token, "rank": 1}, {"at": update(1, key="of model 2")}):
            old.sendall(json.dumps(message).encode() + b"\n")
        pair.ranks[0].begin_update("of model 1")
        assert not pair.over.wait(1.5) and not pair.ended
        assert b"ask" in old.recv(1000)


def test_who_does_not_know_the_token_is_turned_away(pair: Pair) -> None:
    unknown = b'{"token": "?", "rank": 1}\n{"at": 1}\n'
    for words in (unknown, b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"\xff\n", b"x" * 20000):
        with socket.create_connection((pair.where.addresses[0], pair.where.port), timeout=30) as stranger:
            stranger.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    pair.ranks[0].begin_update("of model 1")
    pair.ranks[1].begin_update("of model 2")
    assert pair.over.wait(30), "and it still listens"
