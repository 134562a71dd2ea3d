"""Ranks that are not in step are told where each is, within 10 s, and end; slow ones are left alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import PROGRAMS, Result, run_ranks
from limits import Limit
from parted_ranks import ENDING, NAMED_WITHIN_S, RULE, start, two_at_a_time

HERE = Path(__file__).parent
TORCH, KERAS = PROGRAMS / "torch" / "out_of_step.py", PROGRAMS / "keras" / "out_of_step.py"
ALONE = "a function of on_main() must not call a collective operation"
FORKED = "collective calls are not allowed in a process that was forked"
OURS = "hvdtrain.keras.callbacks(model) must be given to fit() on every rank"
THREADS = "two threads of a rank cannot be in collective operations"


# -- real ranks ----------------------------------------------------------------------------------------------------
# each raises on all ranks, and they can still talk
RAISING = [
    "evaluate_on_rank_0", "evaluate_within_on_main", "collective_in_on_main", "training_in_on_main", "other_order",
    "barrier_against_gather", "leaves_the_loader", "two_models", "gather_in_a_worker", "gather_in_two_threads",
    "branches_that_broadcast", "one_joins_again",
]  # fmt: skip


def check_ended(done: Result, folder: Path, strays: str) -> str:
    """The job has ended with one error on every rank, in time; returns rank 0's lines."""
    assert done.returncode != 0, done.text
    assert RULE in done.ranks_error[0] and RULE in done.ranks_error[1], done.text
    # PyTorch begins the lines of a traceback with the rank
    lines = [re.sub(r"^\[rank\d+\]:", "", line).strip() for line in done.ranks_error[0].splitlines()]
    received = next(i for i, line in enumerate(lines) if line.startswith("received: rank 0: "))
    assert "# here" in lines[received] or "at the end of" in lines[received], done.text
    assert lines[received + 1].startswith("rank 1: ") and strays in lines[received + 1], done.text
    assert "# here" in lines[received + 1] or "at the end of" in lines[received + 1], done.text
    assert any(line.startswith("fix: ") for line in lines)
    assert lines[received].removeprefix("received: ") in done.ranks_error[1], "both ranks tell both lines"
    parted = [float(file.read_text()) for file in folder.glob("parted.*")]
    lived = max((folder / str(rank)).stat().st_mtime for rank in range(2)) - max(parted)
    assert lived <= NAMED_WITHIN_S, f"{lived:.1f} s"
    return "; ".join(lines[received : received + 2])


def check_raised(done: Result, ways: list[str]) -> dict[str, str]:
    """Every way was named on both ranks, in time; returns rank 0's errors."""
    done.check()
    reports = [
        {report["way"]: report for report in map(json.loads, re.findall(r'^\{"way.*\}$', text, re.MULTILINE))}
        for text in (done.ranks_output[0], done.ranks_output[1])
    ]
    for way in ways:
        for report in reports:
            error = report[way]["error"]
            assert any(rule in error for rule in (RULE, ALONE, FORKED, THREADS, OURS)), f"{way}: {error}\n{done.text}"
            assert report[way]["seconds"] <= NAMED_WITHIN_S, report[way]
            assert RULE not in error or error.count("# here") == 2, error
    return {way: report["error"] for way, report in reports[0].items()}


def test_torch_ranks_that_part(tmp_path: Path, limit: Limit) -> None:
    raised, continued, saved, uneven = two_at_a_time(
        lambda: start(TORCH, ["horovod", *RAISING], tmp_path / "raise"),
        lambda: start(TORCH, ["horovod", "one_continues"], tmp_path / "continue"),
        lambda: start(TORCH, ["horovod", "save_on_rank_0"], tmp_path / "save"),
        lambda: start(TORCH, ["ddp", "uneven_loader"], tmp_path / "uneven", "forked torchrun"),
    )
    errors = check_raised(raised, RAISING)
    assert ALONE in errors["evaluate_within_on_main"] and ALONE in errors["training_in_on_main"]
    assert FORKED in errors["gather_in_a_worker"] and 'broadcast("another")' in errors["branches_that_broadcast"]
    assert all(f"sample {count} of epoch 0" in errors["leaves_the_loader"] for count in (12, 16))
    shown = check_ended(uneven, tmp_path / "uneven", ENDING["uneven_loader"])
    limit("T17a", "ddp, a DataLoader of one's own, batches uneven over the ranks", refused=f"{RULE}: {shown}")
    shown = check_ended(saved, tmp_path / "save", ENDING["save_on_rank_0"])
    limit("T17b", "checkpoints.save on rank 0 only, under horovodrun", refused=f"{RULE}: {shown}")
    shown = check_ended(continued, tmp_path / "continue", ENDING["one_continues"])
    limit("T17c", "`continue` on one rank", refused=f"{RULE}: {shown}")


EXITING = """
import sys, hvdtrain
world = hvdtrain.init("torch", device="cpu")
if world.rank == 1:
    sys.exit(3)
world.barrier()
"""


def test_a_rank_that_exits_with_a_code_has_failed_and_is_not_out_of_step() -> None:
    """--max-restarts starts the job again; what ranks out of step do is the program's mistake, and would come again."""
    done = run_ranks(["-c", EXITING], 2, launcher="horovodrun", timeout_s=60)
    assert re.search("Exit code: [13]$", done.err, re.MULTILINE) and RULE not in done.text, done.text


def test_keras_ranks_that_part(tmp_path: Path, limit: Limit) -> None:
    ways = ["evaluate_on_rank_0", "evaluate_in_on_main", "all_reduces_swapped", "callbacks_on_rank_0"]
    errors = check_raised(start(KERAS, ways, tmp_path / "raise", KERAS_BACKEND="torch"), ways)
    asked = start(KERAS, ["gather_in_a_callback"], tmp_path / "callback", KERAS_BACKEND="torch")
    limit("K15a", "if world.is_main: evaluate(...)", refused=errors["evaluate_on_rank_0"])
    limit("K15b", "on_main(evaluate, ...)", refused=errors["evaluate_in_on_main"])
    limit("K15c", "an all-reduce of one rank meets another of the other rank", refused=errors["all_reduces_swapped"])
    limit("K28", "callbacks=hvk.callbacks(model) on rank 0 only", refused=errors["callbacks_on_rank_0"])
    check_ended(asked, tmp_path / "callback", "in update 3 of model 0")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "launcher"), [("horovod", "horovodrun"), ("horovod", "mpirun"), ("ddp", "torchrun")]
)
@pytest.mark.parametrize("way", ENDING)
def test_torch_ranks_that_part_under_launchers(way: str, engine: str, launcher: str, tmp_path: Path) -> None:
    check_ended(start(TORCH, [engine, way], tmp_path, launcher), tmp_path, ENDING[way])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "launcher"), [("horovod", "mpirun"), ("ddp", "torchrun"), ("deepspeed", "torchrun")]
)
def test_ranks_that_raise_on_every_engine(engine: str, launcher: str, tmp_path: Path) -> None:
    check_raised(start(TORCH, [engine, *RAISING], tmp_path, launcher), RAISING)


@pytest.mark.thorough
def test_slow_ranks_are_not_accused(tmp_path: Path) -> None:
    done = start(TORCH, ["horovod", "slow"], tmp_path).check()
    assert all("done" in done.ranks_output[rank] for rank in range(2)), done.text
