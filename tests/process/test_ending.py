"""A thread ends the process while the main thread is blocked, and then is not: whose exit code is it?"""

from __future__ import annotations

import pytest
from harness import run_ranks

from hvdtrain.core.errors import HUNG_CODE

# The link answers nothing, as that of a rank that was stopped: rank 0 waits two seconds for it
PROGRAM = """
import os, socket, sys, threading
from hvdtrain.core import errors
from hvdtrain.watch import watch
from hvdtrain.comm.link import RankLink

mine, other = socket.socketpair()
error = ["the rule", "what came", "the remedy"]
threading.Thread(target=watch.end_all, args=(error, 0, [RankLink(mine)], "hvdtrain", 75), daemon=True).start()
other.settimeout(60)
assert b"the rule" in other.recv(1 << 16)
child = os.fork()
if not child:
    errors.end_now(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
{end}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "pass"])
def test_what_the_thread_has_found_is_told_by_the_exit_code(end: str) -> None:
    done = run_ranks(["-c", PROGRAM.format(end=end)], 1, launcher="none", timeout_s=60)
    assert done.returncode == HUNG_CODE and "the rule" in done.text, done.text


FAILS = """
import socket
from hvdtrain.watch import watch

class Odd:
    socket = None
    def send(self, **said):
        raise RuntimeError("no link at all")

watch.end_all(["the rule", "what came", "the remedy"], 0, [Odd()], "hvdtrain", 75)
"""
PROXY = """
import multiprocessing.pool, weakref
from hvdtrain.watch import watch

class Gone: pass
gone = Gone()
proxy = weakref.proxy(gone)
del gone
watch._end_children()
"""


def test_words_that_fail_do_not_cost_the_exit_code() -> None:
    done = run_ranks(["-c", FAILS], 1, launcher="none", timeout_s=60)
    assert done.returncode == HUNG_CODE and "the rule" in done.text, done.text


def test_an_object_that_cannot_be_looked_at_keeps_no_worker_alive() -> None:
    run_ranks(["-c", PROXY], 1, launcher="none", timeout_s=60).check()
