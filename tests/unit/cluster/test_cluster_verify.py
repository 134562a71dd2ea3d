"""`hvdtrain verify`: what it concludes from numbers, and real ranks under launchers, also some that do not average."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdtrain.cluster.doctor import verify_rank as toy
from hvdtrain.cluster.doctor.verify_rank import (
    BATCH,
    INPUTS,
    MARK,
    OUTPUTS,
    STEPS,
    Measured,
    ToyCheck,
    checks,
    one_process,
    own_start,
    samples,
)
from hvdtrain.cluster.launch import launcher
from hvdtrain.cluster.launch.agents import OnLine
from hvdtrain.cluster.launch.failures import Failure
from hvdtrain.cluster.launch.job import Job
from hvdtrain.cluster.launch.running import Outcome
from hvdtrain.commands import verify

# ---- the reference


def test_the_reference_descends_the_gradient_of_its_error() -> None:
    """Against finite differences of the error itself."""
    start = own_start(0).astype(np.float64)

    def error(weights: np.ndarray) -> float:
        parts = [(x[:BATCH], y[:BATCH]) for x, y in (samples(0), samples(1))]
        gaps = [x @ weights[:-1] + weights[-1] - y for x, y in parts]
        return float(np.mean(np.square(np.concatenate(gaps))))

    moved = (start - one_process(start, range(2), 1)) / toy.RATE
    for place in ((0, 0), (INPUTS - 1, OUTPUTS - 1), (INPUTS, 1)):
        step = np.zeros_like(start)
        step[place] = 1e-5
        assert moved[place] == pytest.approx((error(start + step) - error(start - step)) / 2e-5, rel=1e-5)


# ---- the checks, on made-up ranks


def ranks_of(size: int) -> list[Measured]:
    """What `size` ranks on two hosts measure when all is right: the reference, rounded to float32."""
    start, half = own_start(0), (size + 1) // 2
    first, last = (one_process(start, range(size), steps).astype(np.float32) for steps in (1, STEPS))
    found = []
    for rank in range(size):
        on_second = rank >= half
        card = {
            "rank": rank, "size": size, "local_rank": rank - half * on_second, "host": f"host{1 + on_second}",
            "local_size": size - half if on_second else half, "pid": 100 + rank, "devices": [f"{rank} of all"],
        }  # fmt: skip
        skipped = one_process(start, [rank], 1).astype(np.float32)
        found.append(Measured(card, own_start(rank), start.copy(), first.copy(), last.copy(), skipped, "", {}))
    return found


def by_name(found: Sequence[ToyCheck]) -> dict[str, ToyCheck]:
    return {check.name: check for check in found}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_what_is_right_passes(size: int) -> None:
    found = checks(ranks_of(size), size)
    assert [check.name for check in found] == ["ranks", "broadcast", "averaging", "training", "replicas"]
    assert all(check.ok for check in found), found


Spoil = Callable[[list[Measured]], None]


def spoiled(field: str, of: Callable[[Measured, list[Measured]], Any], *only: int) -> Spoil:
    """Gives this field of some ranks, or of all, another value."""

    def change(ranks: list[Measured]) -> None:
        for its in [ranks[rank] for rank in only] or ranks:
            setattr(its, field, of(its, ranks))

    return change


def card(**fields: Any) -> Spoil:
    return lambda ranks: ranks[1].card.update(fields)


@pytest.mark.parametrize(
    ("spoil", "name", "told"),
    [
        (spoiled("first", lambda its, _: its.skipped), "averaging", "every rank used its own gradient"),
        (
            spoiled("first", lambda its, ranks: its.start + len(ranks) * (its.first - its.start)),
            "averaging",
            "off the mean",
        ),
        (spoiled("first", lambda its, _: np.full_like(its.first, np.nan), 1), "averaging", "rank 1: nan"),
        (spoiled("skipped", lambda its, _: its.first), "averaging", "not seen"),
        (spoiled("start", lambda its, _: its.own_start, 1), "broadcast", "rank(s) 1 did not begin"),
        (spoiled("own_start", lambda _, ranks: ranks[0].own_start), "broadcast", "nothing could be seen"),
        (spoiled("last", lambda its, _: its.first), "training", "10 steps"),
        (
            spoiled("last", lambda its, _: np.nextafter(its.last, 9).astype(np.float32), -1),
            "replicas",
            "rank(s) 3 ended",
        ),
        (card(rank=0), "ranks", "the ranks are [0, 0, 2, 3]"),
        (card(local_rank=0), "ranks", "on host1 the local ranks are [0, 0]"),
        (card(devices=["0 of all"]), "ranks", "ranks share GPUs"),
    ],
)
def test_each_fault_is_seen(spoil: Spoil, name: str, told: str) -> None:
    ranks = ranks_of(4)
    spoil(ranks)
    found = by_name(checks(ranks))[name]
    assert not found.ok and told in found.message, found


# ---- the command, its ranks made up


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return parser.parse_args(flags)


FINDINGS = {
    "framework": "torch", "versions": {"torch": "2"}, "launcher": "horovodrun", "engine": "horovod", "ranks": [{}, {}],
    "checks": [{"name": "averaging", "ok": True, "message": "off by 0"}], "proof": "", "ok": True,
}  # fmt: skip


def ended(monkeypatch: pytest.MonkeyPatch, output: str = "", failed: Failure | None = None) -> list[Job]:
    """Have rank 0 of the launcher's jobs write `output`, and the job end; returns the jobs it gets."""
    jobs: list[Job] = []

    def run(job: Job, on_line: OnLine) -> Outcome:
        jobs.append(job)
        for line in output.splitlines():
            on_line(0, "stdout", line)
        return Outcome(failed)

    monkeypatch.setattr(launcher, "run", run)
    for name in ("SLURM_JOB_ID", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    return jobs


def test_it_starts_its_ranks_on_the_hosts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ended(monkeypatch, f"noise\n{MARK}{json.dumps(FINDINGS)}\n")
    flags = ["-H", "h1:2,h2:2", "--framework", "torch", "--limit", "7", "--network", "10.0.0.0/8", "--ssh-port", "3"]
    assert verify.run(arguments(*flags)) == 0
    (job,) = jobs
    assert [str(host) for host in job.hosts] == ["h1:2", "h2:2"] and job.np == 4
    assert list(job.argv[2:]) == ["hvdtrain.cluster.doctor.verify_rank", "torch", "7", "4"]
    assert job.network == "10.0.0.0/8" and job.ssh.port == 3
    assert "averaging  ok      off by 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "flags", "ranks", "on_cpu"),
    [
        (0, (), 2, False),
        (1, (), 2, True),  # two ranks cannot share it
        (1, ("-np", "1"), 1, False),
        (4, (), 4, False),
        (4, ("--device", "cpu"), 2, True),
    ],
)
def test_ranks_on_this_machine_are_as_many_as_gpus(
    gpus: int, flags: tuple[str, ...], ranks: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "gpu_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    jobs = ended(monkeypatch, MARK + json.dumps(FINDINGS))
    assert verify.run(arguments("--framework", "torch", *flags)) == 0
    assert jobs[0].np == ranks and (jobs[0].env.get("CUDA_VISIBLE_DEVICES") == "") == on_cpu


def test_what_does_not_hold_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check = {"name": "averaging", "ok": False, "message": "every rank used its own gradient"}
    wrong = FINDINGS | {"ok": False, "checks": [check]}
    failure = Failure(1, "h2", 1, "exit code 1", (), 3.0)
    ended(monkeypatch, MARK + json.dumps(wrong), failure)
    assert verify.run(arguments("--framework", "torch")) == 1
    told = capsys.readouterr().out
    assert "averaging  FAILED  every rank used its own gradient" in told and "fix: hvdtrain doctor" in told
