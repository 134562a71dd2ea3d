"""Elastic training with PyTorch: ranks are killed wherever they are, new ones come; it is the unbroken training."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
import torch._dynamo  # which an optimizer loads: it sets a variable of the environment
from elastic_ledgers import noted_in
from harness import PROGRAMS
from test_cluster_elastic import GOES_ON_WITHIN_S, Trained, attempt, lose_at_random, read
from test_cluster_launch import launched

PROGRAM = PROGRAMS / "torch/elastic.py"


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


program = module_of(PROGRAM)

EXACT = 1e-10
SPOTS = ("batch", "backward", "in", "step", "after", "evaluate", "gather", "save", "head")


def train(
    folder: Path, *todo: str, np: int = 3, data: str = "arrays", accumulate: int = 1, epochs: int = 3, rate: float = 30,
    flags: tuple[str, ...] = ("--min-np=1",),
) -> Trained:  # fmt: skip
    arguments = [str(folder), data, str(accumulate), str(epochs), str(rate), *todo]
    with launched(folder, *flags, *arguments, np=np, program=PROGRAM, env={"OMP_NUM_THREADS": "1"}) as started:
        ended = started.end(240)
    return read(folder, ended)


def check(done: Trained, *, epochs: int = 3, batch: int, accumulate: int = 1, second: bool = True) -> None:
    """Each sample once an epoch, in updates of the unbroken run's size; weights, average, rate as plain PyTorch's.

    So it is with the second loader, unless a rank may be lost while that is read.
    """
    for epoch in range(epochs if second else 0):
        assert Counter(noted_in(done.folder, "second", epoch)) == Counter(range(program.SAMPLES)), f"epoch {epoch}"
    per_epoch = -(-program.SAMPLES // (batch * accumulate))
    assert list(done.updates) == list(range(1, epochs * per_epoch + 1))
    for epoch in range(epochs):
        ids = [number for its, numbers in done.updates.values() if its == epoch for number in numbers]
        assert Counter(ids) == Counter(range(program.SAMPLES)), f"epoch {epoch}"
    model, optimizer, scheduler = program.build()
    average = program.Average(model)
    x, y, _ = program.samples()
    for _, numbers in done.updates.values():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[numbers]), y[numbers]).backward()
        optimizer.step()
        scheduler.step()
        average.update(model)
    final = torch.load(done.folder / "final.pt", weights_only=True)
    for kind, expected in (("weights", model.state_dict()), ("average", average.values)):
        found = final[kind]
        gap = max((found[name] - expected[name]).abs().max().item() for name in expected)
        assert gap < EXACT, f"{kind}: {gap:.2e}\n{done.ended.text}"
    assert done.recorded("step", "step")[-1] == final["updates"] == len(done.updates)


def test_the_training_goes_on_as_if_nobody_had_been_lost(tmp_path):
    """Killed before, within and after an update; rank 0, too; replaced each time."""
    done = train(tmp_path, "1.1:18:backward", "2.0:19:step", epochs=8, flags=("--max-np=3",))
    check(done, epochs=8, batch=12)
    assert [its["worker"] for its in attempt(tmp_path)["lost"]] == [1, 0]
    assert done.sizes[0] == 2 and done.sizes[-1] == 3, done.sizes


@pytest.mark.thorough
def test_a_worker_that_was_lost_leaves_no_page(tmp_path):
    """What it says of itself is there while it may be asked for: the job ended well without it."""
    lost = PROGRAMS / "torch" / "lost_once.py"
    with launched(tmp_path, "--min-np=1", program=lost, env={"TMPDIR": str(tmp_path)}) as started:
        ended = started.end(60)
    assert ended.code == 0 and "worker 1 on localhost lost: ended by SIGKILL" in ended.err, ended.text
    assert not list(tmp_path.rglob("*.ring")) and not list(tmp_path.glob("hvdtrain-*"))


@pytest.mark.thorough
def test_fifty_random_losses_and_joins(tmp_path):
    """Any rank that has joined is killed at any time, as long as one is left; four ranks are filled up each time."""
    arguments = ["--min-np=1", "--max-np=4", str(tmp_path), "arrays", "1", "200", "40"]
    with launched(tmp_path, *arguments, np=4, program=PROGRAM, env={"OMP_NUM_THREADS": "1"}) as started:

        def living(lost_s: list[float]) -> list[psutil.Process]:
            joined = {file.suffix[1:] for file in tmp_path.glob("ledger.*") if file.stat().st_size}
            return [its for its in started.belonging(str(PROGRAM)) if str(its.pid) in joined]

        done, _, waited_s = lose_at_random(started, 50, living)
    check(done, epochs=200, batch=16, second=False)
    assert waited_s < GOES_ON_WITHIN_S


@pytest.mark.thorough
@pytest.mark.parametrize("spot", SPOTS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_killed_at_every_spot(tmp_path, spot, rank):
    update = 13 if spot in ("evaluate", "gather", "save", "head") else 5
    check(train(tmp_path, f"1.{rank}:{update}:{spot}", flags=("--min-np=1", "--max-np=3")), batch=12)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_left(tmp_path, rank):
    done = train(tmp_path, f"1.{rank}:5:step:loop", epochs=6, flags=("--min-np=1", "--max-np=3", "--hang-timeout=5"))
    check(done, epochs=6, batch=12)
    assert [its["worker"] for its in attempt(tmp_path)["lost"]] == [rank]
    assert f"rank {rank} (host" in done.ended.err and "has not reached the" in done.ended.err, done.ended.text


@pytest.mark.thorough
def test_one_rank_becomes_three(tmp_path):
    """Its set-up is that of one rank, which compares nothing with others; so is that of those who come."""
    done = train(tmp_path, np=1, epochs=8, rate=10, flags=("--min-np=1", "--max-np=3"))
    check(done, epochs=8, batch=4)
    assert done.sizes[-1] == 3


@pytest.mark.thorough
def test_ranks_that_meet_before_the_first_batch_of_an_epoch_lose_none(tmp_path):
    done = train(tmp_path, "1.1:12:leave", "2.0:14:leave")
    check(done, batch=12)
    assert done.sizes == [3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "accumulate"), [("stream", 1), ("stream_workers", 1), ("arrays", 2), ("workers", 2), ("stream", 2)]
)
def test_data_of_every_kind(tmp_path, data, accumulate):
    done = train(tmp_path, "1.1:3:backward", "2.0:8:in", data=data, accumulate=accumulate)
    check(done, batch=12, accumulate=accumulate)
