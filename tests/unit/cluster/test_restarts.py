"""When a job that failed is started again."""

from __future__ import annotations

import dataclasses

import pytest

from hvdtrain.cluster.launch.failures import LONGEST_WAIT_S, Failure, Restarts
from hvdtrain.cluster.launch.output import failure_block

KILLED = Failure(1, "h", 137, "ended by SIGKILL")


def test_without_progress_they_are_counted_and_wait_longer_and_longer():
    restarts = Restarts(9)
    assert [restarts.after(KILLED, 0)[0] for _ in range(10)] == [1, 2, 4, 8, 16, 32, LONGEST_WAIT_S, 60, 60, None]


def test_progress_begins_the_count_anew_and_waits_for_nothing():
    restarts = Restarts(1)
    assert [restarts.after(KILLED, updates)[0] for updates in (10, 10, 11, 5, 7)] == [0.0, 1.0, 0.0, 1.0, None], (
        "an attempt that goes back, and on from there, has got no further"
    )


@pytest.mark.parametrize("code", [2, 76])
def test_what_would_be_refused_again_is_not_started_again(code):
    assert Restarts(3).after(dataclasses.replace(KILLED, code=code), 120)[0] is None


@pytest.mark.parametrize(
    ("code", "line", "named"),
    [
        (135, "", True),
        (
            1,
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device (28)",
            True,
        ),
        (1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ...", True),
        (1, "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", True),
        (1, "OSError: [Errno 28] No space left on device: '/data/checkpoint'", False),
        (137, "uses shared memory", False),
    ],
)
def test_a_full_shared_memory_is_named_with_what_gives_it_room(code, line, named, tmp_path):
    failure = Failure(1, "h", code, "exit code", (line,))
    said = failure_block(failure, tmp_path)
    assert ("df /dev/shm on h" in said and "--shm-size" in said) is named, said
