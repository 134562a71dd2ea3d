"""`hvdtrain rehearse`: ranks that are forked train as those that a launcher starts, and what parts them is named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from harness import PROGRAMS, Result, run_ranks

PARTED, TRAINS = PROGRAMS / "horovod" / "deadlocks.py", PROGRAMS / "torch" / "rehearsed.py"
OUT_OF_STEP, HUNG, REFUSED = 76, 75, 2
WAYS = (
    "rank_0_averages", "rank_0_sends", "two_orders", "fewer_batches", "stops_early", "catches", "saves_together",
    "lock", "skips_bad_loss", "other_branch",
)  # fmt: skip


def rehearse(tmp_path: Path, *words: object, timeout_s: float = 150) -> Result:
    arguments = ["-m", "hvdtrain", "rehearse", "--log-dir", str(tmp_path / "rehearsal"), *map(str, words)]
    return run_ranks(arguments, 1, launcher="none", timeout_s=timeout_s)


def lines_of(mark: str) -> list[str]:
    return [line.strip() for line in PARTED.read_text().splitlines() if line.endswith(f"# {mark}")]


def words_of(tmp_path: Path, np: int) -> list[list[str]]:
    """What each rank has printed last."""
    logs = sorted((tmp_path / "rehearsal").glob("rank-*.log"))
    assert len(logs) == np
    return [
        next(line for line in log.read_text().splitlines() if re.match(r"\d+ [0-9a-f]{80} ", line)).split()
        for log in logs
    ]


def check_named(done: Result, way: str) -> None:
    """Both lines at which the ranks are, and who is where."""
    assert done.returncode == (HUNG if way == "lock" else OUT_OF_STEP), done.text
    ending = way in ("fewer_batches", "stops_early")
    assert "# there" in done.text, done.text
    assert ("at the end of deadlocks.py" in done.text) if ending else ("# here" in done.text), done.text
    odd = {"rank_0_averages": 0, "rank_0_sends": 0, "saves_together": 0}.get(way, 1)
    if way != "catches":
        assert re.search(rf"rank {odd}[: (]", done.text), done.text
    assert ("after 4 update(s)" in done.text) == (way in ("lock", "catches", "skips_bad_loss", "stops_early")), (
        done.text
    )


@pytest.mark.thorough
def test_a_clean_script_is_not_complained_of_and_trains_as_real_ranks_do(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "-np", 4, "--updates", 0, PARTED)
    assert done.returncode == 0 and "4 ranks ran together to the script's end" in done.err, done.text
    real = run_ranks([PARTED], 4, launcher="horovodrun").check()
    forked = words_of(tmp_path, 4)
    assert forked == [real.ranks_output[rank].split() for rank in range(4)], "bit for bit, at the same places"
    assert "guard: 12 update(s) of 1 optimizer(s) on 4 ranks: averaged" in done.text


@pytest.mark.thorough
def test_ranks_are_told_the_hosts_that_they_would_be_on(tmp_path: Path) -> None:
    assert rehearse(tmp_path, "-np", 3, "--per-host", 2, "--updates", 0, PARTED).returncode == 0
    places = [words[2:] for words in words_of(tmp_path, 3)]
    assert places == [["0", "2", "0", "2"], ["1", "2", "0", "1"], ["0", "1", "1", "2"]]


def test_what_the_user_has_is_not_touched(tmp_path: Path) -> None:
    own, arguments = tmp_path / "own", [TRAINS, tmp_path / "own"]
    real = run_ranks([*arguments, "3"], 2).check()
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    assert "began anew: True" in real.ranks_output[0] and any("checkpoints" in str(path) for path in before)
    done = rehearse(tmp_path, "-np", 2, "--updates", 0, TRAINS, own, 3)
    assert done.returncode == 0, done.text
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before
    assert list((tmp_path / "rehearsal").rglob("run.json")), "there it is instead"
    assert done.out.split("weights: ")[1].strip() == real.ranks_output[0].split("weights: ")[1].strip()
    assert "began anew: True" in done.out, "no checkpoint of the user's was gone on from"


def test_ranks_that_part_are_named(tmp_path: Path) -> None:
    check_named(rehearse(tmp_path, "-np", 3, "--updates", 0, PARTED, WAYS[0]), WAYS[0])


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS[1:])
def test_every_way_to_part_is_named(way: str, tmp_path: Path) -> None:
    check_named(rehearse(tmp_path, "-np", 3, "--updates", 0, PARTED, way), way)


@pytest.mark.parametrize("by_module", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_rank_finds_what_a_process_of_its_own_would(by_module: bool, tmp_path: Path) -> None:
    """Random numbers that nobody has seeded, and where it lies; of a file that begins with a byte-order mark."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    program = package / "own.py"
    program.write_text(
        "import os, random\nimport numpy as np\nimport torch\nimport horovod.torch as hvd\nhvd.init()\n"
        "seen = random.random(), np.random.rand(), torch.rand(1).item(), os.path.isabs(__file__)\n"
        "print(hvd.rank(), *seen, flush=True)\n",
        encoding="utf-8-sig",
    )
    words = ["-m", "package.own"] if by_module else [os.path.relpath(program)]
    folder = tmp_path / "rehearsal"
    arguments = ["-m", "hvdtrain", "rehearse", "--log-dir", str(folder), "-np", "2", "--updates", "0", *words]
    done = run_ranks(arguments, 1, launcher="none", cwd=tmp_path if by_module else None)
    assert done.returncode == 0, done.text
    one, other = ((folder / f"rank-{rank:04d}.log").read_text().split() for rank in range(2))
    assert one[0] == "0" and other[0] == "1" and one[4] == other[4] == "True"
    assert all(mine != its for mine, its in zip(one[1:4], other[1:4], strict=True)), (one, other)


@pytest.mark.thorough
def test_it_ends_in_time(tmp_path: Path) -> None:
    """After the updates that were asked for; with what was wrong; and when the time is over."""
    program = tmp_path / "slow.py"
    program.write_text(
        "import sys, time\nimport horovod.torch as hvd\nhvd.init()\n"
        "if sys.argv[1:] == ['raises'] and hvd.rank() == 1:\n    raise OSError('no disk')\n"
        "time.sleep(600)\n"
    )
    late = rehearse(tmp_path, "-np", 2, "--limit", 15, program)
    assert late.returncode == REFUSED and "each rank must make an update within 15 s" in late.err, late.text
    (tmp_path / "rehearsal").rename(tmp_path / "late")
    stuck = rehearse(tmp_path, "-np", 2, "--updates", 0, "--limit", 28, PARTED, "all_loop")
    assert stuck.returncode == REFUSED and re.search(r"no update for \d+ s after 4", stuck.err), stuck.text
    (tmp_path / "rehearsal").rename(tmp_path / "stuck")
    raised = rehearse(tmp_path, "-np", 2, program, "raises")
    assert raised.returncode == 1 and "rank 1 failed first, after 0 update(s): exit code 1" in raised.err, raised.text
    assert "| OSError: no disk" in raised.err
    again = rehearse(tmp_path, "-np", 2, program)
    assert again.returncode == REFUSED and "--log-dir must be new or empty" in again.err
    (tmp_path / "rehearsal").rename(tmp_path / "raised")
    few = rehearse(tmp_path, "-np", 2, "--updates", 2, TRAINS, tmp_path / "own", 500)
    assert few.returncode == 0 and re.search(r"for \d+ update\(s\), and nothing was found", few.err), few.text
    assert "--updates 0: to its end" in few.err


def test_what_cannot_be_rehearsed_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\nfor:\n")
    for words, said in (
        ([tmp_path / "none.py"], "the script must be a file"),
        (["-m", "hvdtrain.no_such_program"], "-m needs the name of a module"),
        ([tmp_path / "broken.py"], "broken.py, line 2"),
    ):
        done = rehearse(tmp_path, "-np", 2, *words)
        assert done.returncode == REFUSED and said in done.err, done.text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        ("hvdtrain.keras_mnist", "--data", "digits"),
        # ResNet-18 would take 22 GiB
        ("hvdtrain.torch_resnet", "--data", "digits", "--model", "mobilenet_v3_small", "--per-rank-batch", "4"),
    ],
)
def test_64_ranks(words: tuple[str, ...], tmp_path: Path) -> None:
    done = rehearse(tmp_path, "-np", 64, "--per-host", 8, "-m", *words, timeout_s=400)
    assert done.returncode == 0 and "averaging proven: 64 ranks" in done.text, done.text
    print(done.seconds, done.err)
