"""A rank that lets the others wait: who it is, whether it is hung, and what is said and kept of it."""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from watched_pair import Ended

from hvdtrain.comm import ring
from hvdtrain.core import variables
from hvdtrain.core.errors import HUNG_CODE
from hvdtrain.core.launchers import Detected
from hvdtrain.watch import hang, looks, watch
from hvdtrain.watch.looks import CIRCLES, MOVING, STILL, StackSample, movement
from hvdtrain.watch.meeting import Tracker

UPDATE = {"kind": "update", "number": 4, "key": "of model 1", "line": "a.py:1: backward()", "updates": 3, "meetings": 2,
          "agreed": False}  # fmt: skip
FRAMES = [
    {"file": "/x/train.py", "line": 60, "function": "<module>", "text": "main()", "user": True},
    {"file": "/x/train.py", "line": 31, "function": "main", "text": "while True:", "user": True},
    {"file": "/lib/threading.py", "line": 5, "function": "wait", "text": "acquire()", "user": False},
]


def report(rank: int, at: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank, "host": "node", "pid": 100 + rank, "at": at, "updates": 3, "steps": 3, "meetings": 2,
        "on_main": "", "phase": "other", "last": None, "idle_s": 31.0, "awake_s": 9e9, "movement": STILL, "task": "",
        "debugger": "", "stacks": [{"thread": "MainThread", "main": True, "frames": FRAMES}], **more,
    }  # fmt: skip


def judged(late: dict[str, Any], at: dict[str, Any] | None = None, **waiter: Any) -> hang.Verdict:
    return hang.judge({0: report(0, at or UPDATE, **waiter), 1: late}, {}, 30.0)


# -- who is hung ---------------------------------------------------------------------------------------------------
def test_a_rank_that_stands_still_elsewhere_is_hung() -> None:
    assert judged(report(1)) == hang.Verdict("hung", [1], [0])
    assert judged(report(1), idle_s=29.0).kind == "", "the others have not waited for long enough"
    assert judged(report(1, idle_s=29.0)).kind == "", "it came to another place meanwhile"


@pytest.mark.parametrize(
    "longer",
    [
        {"steps": 0}, {"phase": "evaluation"}, {"phase": "checkpoint"}, {"on_main": "save, from a.py:1"},
        {"task": "saves or loads"}, {"movement": CIRCLES},
    ],
)  # fmt: skip
def test_what_may_take_ten_times_longer(longer: dict[str, Any]) -> None:
    late = report(1, **longer)
    assert judged(late).kind == ""
    late["idle_s"] = 301.0
    assert judged(late, idle_s=299.0).kind == "" and judged(late, idle_s=301.0).kind == "hung"


def test_the_end_of_a_program_waits_ten_times_longer() -> None:
    end = {**UPDATE, "kind": "end", "number": 3}
    assert judged(report(1, idle_s=250.0), end, idle_s=250.0).kind == ""
    assert judged(report(1, idle_s=301.0), end, idle_s=301.0).kind == "hung"


def test_a_rank_that_moves_is_never_hung() -> None:
    assert judged(report(1, movement=MOVING, idle_s=9e9), idle_s=9e9, awake_s=9e9) == hang.Verdict("moving", [1], [0])


def test_a_debugger_suspends_it_in_any_rank() -> None:
    assert judged(report(1, debugger="pdb")) == hang.Verdict("debugged", [1])
    assert judged(report(1), debugger="pdb") == hang.Verdict("debugged", [0])
    assert judged(report(1), idle_s=2.0, debugger="pdb").kind == "", "nobody waits: nothing to say"


def test_time_in_which_any_rank_was_stopped_does_not_count() -> None:
    assert judged(report(1, awake_s=5.0)).kind == "" and judged(report(1), awake_s=5.0).kind == ""


def test_a_rank_that_has_done_its_part_is_not_waited_for() -> None:
    assert judged(report(1, updates=4)).kind == ""
    gather = {**UPDATE, "kind": "gather", "number": 3}
    assert judged(report(1), gather).kind == "hung" and judged(report(1, meetings=3), gather).kind == ""
    in_it = {**gather, "kind": "on_main", "agreed": True}
    assert judged(report(1, meetings=3), in_it).kind == "", "it has come, and is done"


def test_rank_0_alone_in_on_main_has_its_time() -> None:
    waits = {**UPDATE, "kind": "on_main", "number": 3, "agreed": True}

    def after(seconds: float) -> hang.Verdict:
        ranks = {0: report(0, on_main="save, from a.py:1", idle_s=seconds), 1: report(1, waits, idle_s=seconds)}
        return hang.judge({n: {**r, "awake_s": 9e9} for n, r in ranks.items()}, {}, 30.0)

    assert after(299.0).kind == "" and after(301.0) == hang.Verdict("hung", [0], [1])


def test_a_silent_rank_is_hung_unless_it_may_be_out_of_reach() -> None:
    def silent(waited: float = 31.0, **known: Any) -> str:
        return hang.judge({0: report(0, UPDATE, idle_s=waited, awake_s=9e9)}, {1: {"rank": 1, **known}}, 30.0).kind

    assert silent(reached=True, idle_s=0.1) == "hung", "what it said last, it did before it fell silent"
    assert silent(reached=False) == ""
    assert silent(21.0, reached=True, state="T (stopped)") == silent(21.0, reached=True, gone=True) == "hung"
    assert silent(19.0, reached=True, state="T (stopped)") == silent(21.0, reached=True, state="R (running)") == ""
    assert silent(reached=True, state="t (tracing stop)", debugger="process 8 traces it") == "debugged"
    assert silent(reached=True, steps=0) == "" and silent(301.0, reached=True, steps=0) == "hung"


# -- does it move --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([], STILL),
        ([1] * 30, STILL),
        ([1, *[3] * 29], STILL),  # it came there by a step, or was seen on its way
        ([*range(100), *[7] * 30], STILL),  # it moved, and has stood still for as long as counts
        ([1, 2, 3] * 10, CIRCLES),
        ([1, 1, 1, 2] * 10, CIRCLES),
        (list(range(30)), MOVING),
        ([1] * 15 + [2] * 15, MOVING),  # what is new may be the last thing that it does: time will tell
        ([1, 2] * 12 + [3], MOVING),
    ],
)
def test_how_a_thread_moves(chains: list[int], expected: str) -> None:
    assert movement([StackSample(*each) for each in enumerate(chains)], 30.0) == expected


def test_a_pause_of_the_machine_begins_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 101.0, 150.0, 151.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    ticks = looks.Ticks(5.0)
    since = [(ticks.tick(), ticks.awake_since)[1] for _ in range(3)]
    assert since == [100.0, 150.0, 150.0]


def test_a_debugger_is_seen() -> None:
    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return trace

    def trace_nothing(tracer: object, frame: FrameType, event: str, arg: object) -> None:
        return None

    def at_a_breakpoint() -> str:
        return looks.debugger()

    before = sys.gettrace()
    plain = {"__name__": "pdb", "looks": looks}
    exec("def cmdloop():\n    return looks.debugger()", plain)
    assert "pdb" in plain["cmdloop"]()  # type: ignore[operator]
    sys.settrace(trace)
    try:
        assert at_a_breakpoint()
        sys.settrace(type("Tracer", (), {"__module__": "coverage.pytracer", "trace": trace_nothing})().trace)
        assert not at_a_breakpoint(), "coverage only counts lines"
    finally:
        sys.settrace(before)


def named(module: str, call: str = "function()", **names: Any) -> Any:
    """A function of a module of that name, which calls what it is given."""
    space: dict[str, Any] = {"__name__": module, **names}
    exec(f"def call(function):\n    return {call}", space)
    return space["call"]


def test_code_of_the_users_that_a_library_calls_is_no_collective() -> None:
    hook, reducer, autograd = named("train"), named("hvdtrain.torch.engines.reducer"), named("torch.autograd")
    with ThreadPoolExecutor(1) as pool:
        asks = partial(
            named("torch.waits", "function(called_back).result()", called_back=looks.called_back), pool.submit
        )
        assert asks() is None
        assert reducer(partial(autograd, partial(hook, asks))) == threading.get_ident(), "a hook, in a backward pass"
        assert hook(partial(reducer, partial(autograd, asks))) is None, "it waits in the library"
        assert reducer(partial(hook, partial(reducer, asks))) is None, "a train_step of the user's own, which waits"


# -- what is said --------------------------------------------------------------------------------------------------
def test_the_error_names_rank_line_and_who_waits() -> None:
    reports = {0: report(0, UPDATE), 1: report(1, phase="input"), 2: report(2, UPDATE)}
    error = hang.hung(hang.judge(reports, {}, 30.0), reports, {}, 30.0, "runs/1/hangs/x.json")
    assert error.received.splitlines() == [
        "rank 1 (host node, process 101) has not reached the collective; it is at train.py:31: while True: (3 update(s)"
        " done, in phase input)",
        "  train.py:60, in <module>: main()",
        "ranks 0, 2 wait in update 4 of model 1: a.py:1: backward()",
        "for 31 s; all ranks' stacks: runs/1/hangs/x.json",
    ]
    assert "cannot be distinguished from slow work" in error.remedy and variables.HANG_S in error.remedy


# -- what is kept --------------------------------------------------------------------------------------------------
def test_a_page_outlives_its_rank(tmp_path: Path) -> None:
    page = ring.open_ring(tmp_path, "token", 1)
    assert page is not None
    page.tell({"rank": 1, "phase": "input"})
    page.tell({"rank": 1, "phase": "forward"})
    page.note(ring.UPDATE, 41, 7, 41)
    found = ring.read_ring(page.path)
    assert found is not None and found.pop("time") <= time.time()
    assert found == {"rank": 1, "phase": "forward", "in": "in an update", "updates": 41, "meetings": 7, "steps": 41}
    assert page.path.stat().st_size == mmap.PAGESIZE
    page.remove()
    assert not page.path.parent.exists() and ring.read_ring(page.path) is None


def test_a_page_that_was_half_written_has_the_text_before(tmp_path: Path) -> None:
    page = ring.Ring(tmp_path / "rank-1.ring")
    page.tell({"phase": "input"})
    page.tell({"phase": "forward", "line": "x" * 5000})
    found = ring.read_ring(page.path)
    assert found is not None and found["phase"] == "forward" and len(found["line"]) == 150
    raw = bytearray(page.path.read_bytes())
    raw[2100:2110] = b"\0" * 10
    page.path.write_bytes(raw)
    found = ring.read_ring(page.path)
    assert found is not None and found["phase"] == "input"
    page.path.write_bytes(b"something else")
    assert ring.read_ring(page.path) is None


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "kept"), [(Unspeakable(), "Unspeakable"), (ValueError("\U0001f600" * 5000), "ValueError: \U0001f600")]
)
def test_the_page_of_a_rank_that_fails_stays(tmp_path: Path, error: Exception, kept: str) -> None:
    page = ring.open_ring(tmp_path, "token", 1)
    assert page is not None
    page.tell({"line": "x" * 5000, "on_main": "\U0001f600" * 5000})
    assert ring.last_words(page, tmp_path, 1, error, ends=False) is page, "it is removed if the program ends well"
    ring.last_words(page, tmp_path, 1, SystemExit(1), ends=True)
    page.tell({"line": "of the thread that watches"})
    found = ring.read_ring(page.path)
    assert found is not None and found["error"].startswith(kept) and found["line"].startswith("of the thread")


def test_a_rank_that_has_no_page_makes_one_in_the_run_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    ring.last_words(ring.open_ring(None, "token", 1), None, 1, ValueError("mine"), ends=True)
    for nowhere in (None, tmp_path / "on another host"):
        ring.last_words(None, nowhere, 1, ValueError("mine"), ends=True)
    assert not list(tmp_path.rglob("*.ring"))
    alone = Tracker(0, 1)
    alone.use_run_dir(tmp_path)
    alone.fails(ValueError("mine"))
    assert not list(tmp_path.rglob("*.ring")), "its record says it"
    tracker = Tracker(1, 2)
    tracker.use_run_dir(tmp_path)
    tracker.fails(ValueError("mine"))
    assert [path.name for path in tmp_path.rglob("*.ring")] == ["rank-1.ring"]


def test_the_next_attempt_takes_away_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    for rank in (0, 1, 2, 11):
        ring.last_words(None, tmp_path, rank, ValueError("mine"), ends=True)
    Tracker(1, 2).use_run_dir(tmp_path)
    assert sorted(path.stem for path in tmp_path.rglob("*.ring")) == ["rank-0", "rank-11", "rank-2"]
    Tracker(0, 2).use_run_dir(tmp_path)
    assert not (tmp_path / ring.FOLDER).exists()


# -- two trackers of one process, real sockets ---------------------------------------------------------------------
class Pair(Ended):
    """Ranks 0 and 1, watched; both are of this process, whose main thread is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(monkeypatch, HUNG_CODE)
        monkeypatch.setattr(watch, "ANSWER_S", 0.5)
        monkeypatch.setenv(variables.RUN_DIR, str(folder))
        environ = {variables.IN_STEP_S: "0.2", variables.HANG_S: "0.6"}
        listener, self.where = watch.listen(Detected("mpirun", 0, 2, 0, 2, 0, None), environ)
        who = [("node", 1), ("node", 2)]
        self.ranks = [watch.start(rank, 2, self.where, listener if rank == 0 else None, who) for rank in range(2)]
        for tracker in self.ranks:
            with tracker.update("of model 1"):
                pass


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pair]:
    found = Pair(monkeypatch, tmp_path)
    yield found
    for rank in found.ranks:
        rank.close()
    assert not list(tmp_path.rglob("*.ring")), "removed at the end"


def wait_here(pair: Pair, seconds: float) -> bool:
    return pair.over.wait(seconds)


def test_a_rank_that_hangs_ends_the_job(pair: Pair, tmp_path: Path) -> None:
    pair.ranks[0].begin_update("of model 1")
    assert wait_here(pair, 30)
    assert pair.ended[0] == pair.ended[1]
    lines = pair.ended[0][1].splitlines()
    assert "the collective; it is at test_hang.py" in lines[0] and "return pair.over.wait(seconds)" in lines[0]
    assert any("rank 0 waits in update 2 of model 1: test_hang.py" in line for line in lines), lines
    (file,) = (tmp_path / ring.FOLDER).glob("*.json")
    kept = json.loads(file.read_text())
    assert str(file) in pair.ended[0][1] and kept["received"] == pair.ended[0][1]
    assert [its["rank"] for its in kept["ranks"]] == [0, 1] and len(kept["ranks"][1]["stacks"]) > 2


def test_a_callback_in_the_middle_of_an_update_is_no_collective(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "called_back", lambda: threading.get_ident())
    assert pair.ranks[0].watch is not None
    pair.ranks[0].begin_update("of model 1")
    own = looks.Own(pair.ranks[0], pair.where)
    try:
        assert own.report(full=False)["at"] is None
        monkeypatch.setattr(looks, "called_back", lambda: None)
        assert own.report(full=False)["at"]["kind"] == "update"
    finally:
        own.close()


def test_a_rank_that_comes_in_time_does_not(pair: Pair) -> None:
    for _ in range(4):
        pair.ranks[0].begin_update("of model 1")
        assert not wait_here(pair, 0.4)
        pair.ranks[1].begin_update("of model 1")
        for rank in pair.ranks:
            rank.end_update()
    assert not pair.ended


def test_one_that_moves_is_only_noted(pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    count = iter(range(10**9))
    monkeypatch.setattr(looks, "chain_of", lambda _: next(count))
    pair.ranks[0].begin_update("of model 1")
    assert not wait_here(pair, 3.0) and not pair.ended
    said = capsys.readouterr().err
    assert said.count("the job continues, because the late ranks still move") == 1, said


def test_rank_1_says_so_where_rank_0_does_not_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was stopped, say: here nobody listens."""
    monkeypatch.setattr(watch, "connect", lambda meeting, rank: None)
    pair = Pair(monkeypatch, tmp_path)
    pair.ranks[0].close()
    with pair.ranks[1].update("of model 1"):
        until = time.monotonic() + 30
        while not pair.ended and time.monotonic() < until:
            wait_here(pair, 0.05)
    pair.ranks[1].close()
    assert list(pair.ended) == [1] and "rank 0 (host node, process 1) has not reached the" in pair.ended[1][1]
