"""Sums of the ranks of one host, through memory that they share (the recipe's patch `shared-memory`)."""

from __future__ import annotations

import pytest
from harness import PROGRAMS, Result, run_ranks

SUMS, KILLED = PROGRAMS / "horovod" / "shared_sums.py", PROGRAMS / "horovod" / "shared_sums_killed.py"


def sums(ranks: int, how: str, launcher: str = "forked", **env: str) -> Result:
    result = run_ranks([SUMS, how], ranks, launcher=launcher, env=env, timeout_s=200).check()
    assert all("right: 260 sums" in text for text in result.ranks_output.values()), result.text
    return result


@pytest.mark.parametrize(("launcher", "ranks"), [("forked", 2), pytest.param("mpirun", 3, marks=pytest.mark.thorough)])
def test_sums_are_numpys_bit_for_bit(launcher: str, ranks: int) -> None:
    sums(ranks, "shared", launcher)


@pytest.mark.thorough
def test_one_rank_that_does_not_want_to_decides_for_all() -> None:
    code = "import os, sys; os.environ['HOROVOD_SHARED_MEMORY'] = '10'[int(os.environ['HOROVOD_RANK']) == 1]; "
    code += f"sys.argv = ['sums', 'sockets']; exec(open({str(SUMS)!r}).read())"
    run_ranks(["-c", code], 2, launcher="horovodrun", timeout_s=200).check()  # of more, sockets add in another order


@pytest.mark.parametrize(
    ("times", "hosts", "how"),
    [
        (10, "a:2", "kill"),
        *(
            pytest.param(*its, marks=pytest.mark.thorough)
            for its in ((100, "a:2", "kill"), (30, "a:2,b:2", "kill"), (20, "a:3,b:1", "kill"), (20, "a:3", "stop"))
        ),
    ],
)
def test_who_is_lost_is_missed_and_nothing_is_left(times: int, hosts: str, how: str) -> None:
    """At random instants: while sums are agreed upon, over sockets where there are several hosts, and added up."""
    done = run_ranks([KILLED, str(times), hosts, how], 1, launcher="none", timeout_s=60 + 6 * times).check()
    # a loss was found there: by who logs it, or by what a rank was told (the program's own count)
    assert "in shared memory waits for a process that has ended" in done.err or "'shared memory'" in done.out, done.text


@pytest.mark.thorough
def test_a_rank_that_can_open_no_file_takes_nobody_for_dead() -> None:
    code = (
        "import os, resource, time, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "if hvd.rank():\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "    try:\n"
        "        kept = [os.open('/dev/null', 0) for _ in range(64)]\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
        "for _ in range(3):\n"
        "    time.sleep(0.2 * (hvd.rank() == 0))  # the other one waits, and looks whether this one is there\n"
        "    assert hvd.allreduce(torch.ones(300), op=hvd.Sum)[0] == 2\n"
    )
    assert "Too many open files" in run_ranks(["-c", code], 2, launcher="horovodrun", timeout_s=60).check().out
