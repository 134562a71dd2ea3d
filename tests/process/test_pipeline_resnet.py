"""The pipeline program, really run: its pictures and its JSON, its flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import REPOSITORY, Result, run_ranks
from torch import nn

from hvdtrain import pipeline_resnet
from hvdtrain.vision import trials

# 32x32 is one pixel before the classifier: batch-norm needs 2 pictures
SMALL = ["--model", "resnet18", "--image-size", 32, "--classes", 4, "--batch", 6, "--balance", "20,15"]


def run(*flags: object) -> Result:
    return run_ranks(["-m", "hvdtrain.pipeline_resnet", *map(str, flags)], 1, timeout_s=240)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("out") / "pp"
    flags = ["--devices", "cpu,cpu", "--compare", "--sweep", 1, 2, 3, 4, 6, 9, "--tune", "--repeats", 2, "--out", out]
    preset = ["--preset", "tutorial", "--batches", 1]
    return run(*preset, *SMALL, "--micro-batches", 2, *flags).check(), out


def test_writes_pictures_and_every_number(whole: tuple[Result, Path]) -> None:
    _, out = whole
    assert {path.name for path in out.iterdir()} == {"bars.png", "split_size.png", "result.json"}
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    result = json.loads((out / "result.json").read_text())
    assert (result["format"], result["program"]) == (1, "hvdtrain.pipeline_resnet")
    assert result["settings"]["batch"] == 6 and result["machine"]["cores"] >= 1
    assert [stage["segments"] for stage in result["stages"]] == [20, 15]
    check_compare(result["compare"])
    check_sweep(result["sweep"])
    check_tune(result["tune"])


def check_compare(compare: dict[str, Any]) -> None:
    names = list(compare["seconds"])
    assert names[0].startswith("single device (cpu with 1 thread") and names[-2] == "naive split"
    assert names[-1] == compare["pipeline"] == "pipeline, split size 3 (2 micro-batches)"
    assert all(len(its) == 2 and min(its) > 0 for its in compare["seconds"].values())
    assert all(0 < ratio["low"] <= ratio["value"] <= ratio["high"] for ratio in compare["pipeline_over"].values())
    assert compare["pipeline_over"].keys() == compare["seconds"].keys() - {compare["pipeline"]}


def check_sweep(sweep: dict[str, Any]) -> None:
    by = sweep["by_micro_batches"]
    assert {count: by[count]["split_size"] for count in by} == {"3": 2, "2": 3, "1": 6}
    assert all(len(one["seconds"]) == 2 and one["predicted_s"] > 0 for one in by.values())
    assert "Expected more than 1 value per channel" in sweep["failed"]["6"], "one picture each"
    assert len(sweep["left_out"]) == 2 and "more than the batch" in sweep["left_out"][1]
    best = min(by, key=lambda count: sum(by[count]["seconds"]))
    assert str(sweep["best"]) == best


def check_tune(tune: dict[str, Any]) -> None:
    assert str(tune["best"]) in tune["prediction_s"] and tune["verdict"]


def test_the_toy_by_hand_and_by_split_is_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)).double()
    data = [[torch.randn(20, n, dtype=torch.float64) for n in (10, 5)] for _ in range(10)]
    plain = []
    for x, y in data:
        loss = ((model(x) - y) ** 2).mean()
        plain.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    result = run_ranks([REPOSITORY / "examples" / "two_devices.py", "cpu", "cpu"], 1, timeout_s=240).check()
    rows = [line.split() for line in result.out.splitlines() if line[:1].isdigit()]
    assert len(rows) == len(plain) == 10
    for (_, by_hand, by_split), wanted in zip(rows, plain, strict=True):
        assert abs(float(by_hand) - wanted) < 1e-10 and abs(float(by_split) - wanted) < 1e-10


def test_sizes_make_counts() -> None:
    counts, left_out = trials.counts_of([60, 1, 3, 5, 8, 10, 12, 20, 40], 32)
    assert counts == {32: 1, 11: 3, 7: 5, 4: 8, 3: 11, 2: 16}
    assert [line.split()[0] for line in left_out] == ["10", "40", "60"]
    assert trials.counts_of(pipeline_resnet.SIZES, 120)[0] == {
        120: 1, 40: 3, 24: 5, 15: 8, 12: 10, 10: 12, 6: 20, 3: 40, 2: 60,
    }  # fmt: skip


def settings(*flags: object, devices: tuple[str, ...] = ("cpu", "cpu")) -> trials.TrialSettings:
    return pipeline_resnet.settings_of(pipeline_resnet.parser().parse_args(list(map(str, flags))), devices)


def test_the_tutorial_is_exact() -> None:
    its = settings("--preset", "tutorial")
    assert its == trials.TrialSettings(120, 128, 1000, batches=3, repeats=10, loss="mse", micro_batches=120 // 20)
    assert pipeline_resnet.parser().parse_args([]).model == "resnet50"
    assert pipeline_resnet.SIZES == [1, 3, 5, 8, 10, 12, 20, 40, 60]
    assert settings("--preset", "tutorial", "--batch", 12).batch == 12, "flags go before"
    assert settings().batch < settings(devices=("cuda:0", "cuda:1")).batch


def test_not_below_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1,
                 "GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": 1, "CONTROLLER": "gloo"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    with pytest.raises(SystemExit) as ended:
        pipeline_resnet.main(["--compare"])
    assert ended.value.code == 2 and "several ranks train with hvdtrain.torch_resnet" in capsys.readouterr().err
