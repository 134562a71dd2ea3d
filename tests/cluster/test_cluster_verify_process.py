"""`hvdtrain verify`: what it concludes from numbers, and real ranks under launchers, also some that do not average."""

from __future__ import annotations

import json
from typing import Any

import cluster_hosts
import pytest
from harness import Result, run_ranks, tool

from hvdtrain.cluster.doctor.verify_rank import MARK

# ---- real ranks


def holds(result: Result, *frameworks: str, launcher: str) -> dict[str, Any]:
    lines = [line for text in (result.ranks_output.get(0, ""), result.out) for line in text.splitlines()]
    found = json.loads(next(line for line in lines if line.startswith("{")))
    assert found["ok"] and list(found["frameworks"]) == list(frameworks), result.text
    for its in found["frameworks"].values():
        assert its["launcher"] == launcher and len(its["ranks"]) == 2, result.text
        assert all(check["ok"] for check in its["checks"]) and len(its["checks"]) == 5
        assert "a step that skips the averaging is off by 0." in its["checks"][2]["message"]
        assert "averaging proven: 2 ranks" in its["proof"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [["torch"], pytest.param(["torch", "keras"], marks=pytest.mark.thorough)])
def test_alone_it_verifies_each_framework(names: list[str]) -> None:
    flags = [flag for name in names for flag in ("--framework", name)]
    result = run_ranks(["-m", "hvdtrain", "verify", "--json", *flags], 1, launcher="none", timeout_s=200).check()
    found = holds(result, *names, launcher="horovodrun")
    assert found["seconds"] < 120  # 60 on a machine with nothing else to do


LAUNCHED = [("horovodrun", ("keras",)), ("mpirun", ("keras",)), ("torchrun", ())]


@pytest.mark.thorough
@pytest.mark.parametrize(("launcher", "frameworks"), LAUNCHED)
def test_under_a_launcher_it_is_the_ranks(launcher: str, frameworks: tuple[str, ...]) -> None:
    flags = [flag for name in frameworks for flag in ("--framework", name)]
    result = run_ranks([tool("hvdtrain"), "verify", "--json", *flags], 2, launcher=launcher, timeout_s=200).check()
    holds(result, *(frameworks or ("torch",)), launcher=launcher)


@pytest.mark.slow
@pytest.mark.thorough
def test_over_two_hosts() -> None:
    with cluster_hosts.cluster(2, interfaces=["eth0", "ens5"]) as c:
        flags = ["verify", "-H", "host1:1,host2:1", "--json"]
        done = c.run("host1", [tool("hvdtrain"), *flags], timeout_s=200).check()
    found = holds(done, "torch", "keras", launcher="horovodrun")
    for its in found["frameworks"].values():
        assert [(rank["host"], rank["local_size"]) for rank in its["ranks"]] == [("host1", 1), ("host2", 1)]


# hvdtrain itself refuses to train so: what it prepared is replaced by plain PyTorch, after the broadcast
BROKEN = """\
import copy, sys, types
import torch
import hvdtrain.torch
from hvdtrain.cluster.doctor import verify_rank as rank
prepare = hvdtrain.torch.prepare
def plain(model, optimizer):
    model, _ = prepare(model, optimizer)
    model = copy.deepcopy(hvdtrain.torch.unwrap(model))
    sgd = torch.optim.SGD(model.parameters(), lr=rank.RATE)
    return model, types.SimpleNamespace(zero_grad=sgd.zero_grad, step=sgd.step, backward=torch.Tensor.backward)
hvdtrain.torch.prepare = plain
hvdtrain.torch.verify = lambda model, optimizer: "left out"
sys.exit(rank.main())
"""


@pytest.mark.thorough
def test_ranks_that_do_not_average_are_seen(tmp_path: Any) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    result = run_ranks([tmp_path / "broken.py", "torch", "60", "2"], 2)
    assert result.returncode == 1, result.text
    lines = result.ranks_output.get(0, "").splitlines()
    line = next((line for line in lines if line.startswith(MARK)), None)
    assert line is not None, result.text
    found = {check["name"]: check for check in json.loads(line.removeprefix(MARK))["checks"]}
    wrong = {name for name, check in found.items() if not check["ok"]}
    assert wrong == {"averaging", "training", "replicas"}, found
    assert "every rank used its own gradient" in found["averaging"]["message"]
