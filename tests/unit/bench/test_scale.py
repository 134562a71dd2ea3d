"""`hvdtrain scale`: what is read, printed and written; no timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.commands import scale
from hvdtrain.pipeline.plan.scaling import BucketTiming
from hvdtrain.vision.classifiers import buckets_of

GIVEN = ["scale", "--step", "0.31", "--gradients", "170MB"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with_code = main([*words])
    assert with_code == 2
    return capsys.readouterr().err


def write_run(folder: Path, windows: list[tuple[int, dict[str, float]]], ranks: list[dict[str, float]]) -> Path:
    folder.mkdir()
    record = {"world": {"size": len(ranks)}, "config": {"model": "resnet18"}}
    events: list[dict[str, Any]] = [{"kind": "start"}]
    events += [
        {"kind": "step", "step": n, "steps": n, "samples": 32 * n * len(ranks), "seconds": its} for n, its in windows
    ]
    events += [{"kind": "epoch", "epoch": 0, "ranks": ranks}]
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "events.jsonl").write_text("".join(json.dumps(its) + "\n" for its in events))
    return folder


def window(backward: float, **more: float) -> dict[str, float]:
    return {"forward": 1.0, "backward": backward, "communication": 5.0} | more


def test_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--samples", "64", "--link", "3.125", "14", "--per-host", "4", "--ranks", "512", "8", "8",
    ]  # fmt: skip
    assert main([*GIVEN, *flags]) == 0
    text = capsys.readouterr().out
    assert main([*GIVEN, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "predicted, not measured" in text and "efficiency is below 90%" in text
    assert "given: a step of 0.31 s; no spread: no stragglers; 170.0 MB of gradients; 3.12 GB/s and 14 us" in text
    assert "assumed: two thirds of a step are its backward pass" in text and "12.5 GB/s and 30 us inside a host" in text
    assert (found["format"], found["command"], set(found["below"])) == (1, "scale", {"90%", "75%", "50%"})
    assert [step["ranks"] for step in found["predicted"]] == [8, 512]
    for step in [*found["predicted"], *found["remedies"].values()]:
        parts = ("compute_s", "straggler_s", "exposed_communication_s", "negotiation_s")
        assert step["step_s"] == pytest.approx(sum(step[part] for part in parts))
        assert step["efficiency"] == pytest.approx(step["compute_s"] / step["step_s"])
        assert step["samples_per_s"] == pytest.approx(step["ranks"] * step["samples"] / step["step_s"])
        assert f"{step['efficiency']:.1%}" in text
    assert sum(size for size, _ in found["buckets"]) == pytest.approx(170e6) and len(found["buckets"]) == 7


def test_a_runs_steps_over_ranks_and_windows(tmp_path: Path) -> None:
    """Rank 1 is a fifth slower; the first window and one with an evaluation are left out; communication is no work."""
    ranks = [{"forward": 10.0, "backward": 20.0, "communication": 9.0}, {"forward": 12.0, "backward": 24.0}]
    windows = [(1, window(90.0)), (2, window(3.0)), (1, window(2.0)), (1, window(9.0, evaluation=1.0))]
    sources: dict[str, list[str]] = {"measured": [], "given": [], "assumed": []}
    compute_s, share, logged = scale.of_run(write_run(tmp_path / "a", windows, ranks), sources)
    assert sorted(compute_s) == pytest.approx([2.0, 2.0, 2.4, 2.4, 3.0, 3.6])
    assert share == pytest.approx(5 / 7) and logged == {"samples": 32, "model": "resnet18"}
    assert "3 steps of 2 rank(s)" in sources["measured"][0] and "means of some" in sources["assumed"][0]


def test_a_run_is_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [(1, window(2.0)), (1, window(2.0)), (1, window(4.0))], [{"forward": 1.0}] * 2)
    assert main(["scale", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (first, *_), measured = found["predicted"], found["measured"]
    assert any("46.8 MB of resnet18's gradients" in each for each in measured), measured
    assert first["compute_s"] == pytest.approx(4.0) and first["straggler_s"] == pytest.approx(5 - 2 * 0.5**8 - 4)
    keras = write_run(tmp_path / "k", [(1, {"train_step": 2.0})] * 3, [{"train_step": 6.0}] * 2)
    with (keras / "events.jsonl").open("a") as events:
        events.write('{"kind": "model", "gradient_bytes": 4000000}\n')
    assert main(["scale", str(keras)]) == 0
    said = capsys.readouterr().out
    assert "in 2 windows; 4.0 MB of gradients\n" in said
    assert "what they waited for others is in them" in said and "two thirds" in said


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither" in refused(capsys, "scale")
    assert "both" in refused(capsys, *GIVEN, str(tmp_path))
    assert "gradients must have a size" in refused(capsys, "scale", "--step", "1")
    assert "the backward pass cannot exceed the step" in refused(capsys, *GIVEN, "--backward", "0.4")
    assert "a run's directory" in refused(capsys, "scale", str(tmp_path))
    assert "did you mean resnet50" in refused(capsys, "scale", "--step", "1", "--model", "resnt50")
    (tmp_path / "comm.json").write_text('{"links": {}, "settings": {}}')
    assert "with a ring" in refused(capsys, *GIVEN, "--comm", str(tmp_path / "comm.json"))
    for wrong in ("--gradients=-1MB", "--gradients=1TB", "--ranks=0", "--way=star", "--step=0"):
        assert "must be" in refused(capsys, *GIVEN, wrong)


def test_a_models_gradients_come_as_its_layers_are_computed() -> None:
    """VGG-16: nine tenths of its bytes are in three layers that take hardly any time, and come first."""
    tensors = buckets_of("vgg16", 0)
    assert sum(its.size_bytes for its in tensors) == 4 * 138_357_544 and len(tensors) == 32
    early = [its for its in tensors if its.ready < 0.01]
    assert sum(its.size_bytes for its in early) / (4 * 138_357_544) == pytest.approx(0.894, abs=0.001)
    assert tensors[-1] == BucketTiming(4 * 3 * 9 * 64, 1.0)
    buckets = buckets_of("vgg16", 25 << 20)
    assert sum(its.size_bytes for its in buckets) == 4 * 138_357_544 and 5 < len(buckets) < 32
    assert len(buckets_of("vit_b_16", 0)) == 152, "a function takes some of its weights"
