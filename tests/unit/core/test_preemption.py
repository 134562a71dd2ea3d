"""When a rank that was preempted waits for the next update, and when it ends at once."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.comm import elastic
from hvdtrain.core import variables
from hvdtrain.core.errors import PREEMPTED_CODE
from hvdtrain.watch import preemption
from hvdtrain.watch.meeting import Tracker
from hvdtrain.watch.preemption import ASKS, ENDS, Notice, is_preempted, wanted

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Signals as a new process has them, whatever another test has left."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (TERM, USR1)}
    yield
    preemption.release()
    for number, handler in before.items():
        signal.signal(number, handler)


def notice(environ: Mapping[str, str] | None = None, tracker: Tracker | None = None) -> Notice:
    return Notice(1, tracker or Tracker(), environ or {})


@pytest.mark.parametrize("number", [TERM, USR1])
def test_the_first_signal_is_noted_and_said_once(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    its = notice()
    assert not its.note(number, 5.0) and its.preempted
    assert not its.note(USR1, 6.0) and not its.note(signal.SIGINT, 6.0)
    said = capsys.readouterr().err
    assert said.count("rank 1 got") == 1 and signal.Signals(number).name in said and f"code {PREEMPTED_CODE}" in said


def test_another_sigterm_ends_the_rank_unless_it_is_the_first_one_twice() -> None:
    its = notice()
    assert [its.note(TERM, at_s) for at_s in (5.0, 5.9, 6.1)] == [False, False, True]
    its = notice()
    assert [its.note(number, at_s) for number, at_s in ((USR1, 0.0), (USR1, 5.0), (TERM, 9.0))] == [False] * 3


@pytest.mark.parametrize(("says", "ends"), [(ENDS, True), (b"", False), (None, False)])
def test_a_launcher_that_ends_the_job_is_believed(says: bytes | None, ends: bool, tmp_path: Path) -> None:
    file = tmp_path / "ending"
    if says is not None:
        file.write_bytes(says)
    its = notice({variables.ENDING: str(file)})
    assert its.note(TERM, 5.0) is ends and its.preempted is not ends


def test_a_rank_that_has_no_place_any_more_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    line = SimpleNamespace(dismissed=False, say=lambda **_: None)
    monkeypatch.setattr(elastic, "_line", line)
    its, late = notice(), notice()
    assert not late.note(TERM, 5.0) and not late.blocked(5.2)
    line.dismissed = True  # the word came after the signal
    assert late.blocked(5.4) and not its.blocked(5.4), "this one was not told"
    assert its.note(TERM, 5.0)


def test_a_rank_that_waits_for_the_others_in_vain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(1, 2)
    its = notice(tracker=tracker)
    start = time.monotonic()
    tracker.begin_update("of model 1")
    assert not its.blocked(start + 1000), "nobody has told it"
    its.note(USR1, start)
    assert not its.blocked(start + 9.9)
    monkeypatch.setattr(time, "monotonic", lambda: start + 11)
    assert its.blocked(start + 11)
    tracker.longest_s = 20.0
    assert not its.blocked(start + 11), "its updates take long"
    tracker.longest_s = 0.0
    tracker.end_update()
    assert not its.blocked(start + 11), "it computes"
    assert tracker.longest_s == pytest.approx(11, abs=0.5)


@pytest.mark.parametrize(
    ("says", "variable", "handled", "is_asked"),
    [(ASKS, "on", False, True), (ENDS, "on", False, False), (ASKS, "off", False, False), (ASKS, "on", True, False)],
)
def test_who_begins_a_world_that_is_to_end(
    says: bytes, variable: str, handled: bool, is_asked: bool, tmp_path: Path
) -> None:
    """A program that handles the signal itself, for a dump of its stacks, is not asked to end by it."""
    (tmp_path / "ending").write_bytes(says)
    if handled:
        signal.signal(USR1, lambda *_: None)
    environ = {variables.ENDING: str(tmp_path / "ending"), variables.PREEMPTION: variable}
    assert preemption.asked(environ) is is_asked and not preemption.asked({})


@pytest.mark.parametrize(("value", "on"), [("", True), ("on", True), ("off", False)])
def test_it_can_be_switched_off(value: str, on: bool) -> None:
    assert wanted({variables.PREEMPTION: value}) is on
    preemption.watch(0, Tracker(), {variables.PREEMPTION: value})
    assert (signal.getsignal(TERM) is not signal.SIG_DFL) is on


def test_signals_are_noted_until_they_are_released(capfd: pytest.CaptureFixture[str]) -> None:
    preemption.watch(3, Tracker(), {})
    assert not is_preempted()
    os.kill(os.getpid(), USR1)
    wait_until_told()
    preemption.release()
    assert not is_preempted() and [signal.getsignal(number) for number in (TERM, USR1)] == [signal.SIG_DFL] * 2
    assert signal.set_wakeup_fd(-1) == -1 and "hvdtrain preemption" not in [t.name for t in threading.enumerate()]
    assert "rank 3 got SIGUSR1" in capfd.readouterr().err


def wait_until_told() -> None:
    deadline = time.monotonic() + 20
    while not is_preempted():
        assert time.monotonic() < deadline


def test_a_signal_is_noted_after_a_loop_of_asyncio_has_taken_the_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    async def other() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, print)

    preemption.watch(0, Tracker(), {})
    asyncio.run(other())
    assert signal.set_wakeup_fd(-1) == -1, "it has left nobody behind who reads them"
    os.kill(os.getpid(), USR1)
    wait_until_told()
    preemption.release()


def test_a_handler_of_the_users_is_not_given_a_second_one_nor_is_one_in_c() -> None:
    got: list[int] = []
    before = signal.signal(TERM, lambda number, _: got.append(number))
    faulthandler.register(USR1)
    try:
        preemption.watch(0, Tracker(), {})
        assert not preemption.is_free(TERM) and not preemption.is_free(USR1)
        os.kill(os.getpid(), TERM)
        assert got == [TERM] and signal.getsignal(USR1) is signal.SIG_DFL
        preemption.release()
    finally:
        faulthandler.unregister(USR1)
        signal.signal(TERM, before)
