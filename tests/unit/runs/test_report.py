"""Tests `hvdtrain report`: the page of runs, from their files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.commands import report, report_data

EVEN = {"input": 0.1, "forward": 1.0, "backward": 2.0, "communication": 0.3, "optimizer": 0.1}


def write(folder: Path, events: list[dict[str, Any]], **record: Any) -> Path:
    folder.mkdir(parents=True)
    its = {"status": "finished", "started": "2026-01-01T00:00:00+00:00", "result": {}, "attempts": [{}], **record}
    (folder / "run.json").write_text(json.dumps(its))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def steps(*numbers: int, since: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"time": since + number, "kind": "step", "step": number, "epoch": 0, "samples_seen": 8 * number, "lr": 0.1,
         "steps": 1, "loss": 1 / number, "samples": 8, "samples_per_s": 100.0, "seconds": EVEN} | more
        for number in numbers
    ]  # fmt: skip


def epoch(*ranks: dict[str, float], number: int = 0) -> dict[str, Any]:
    return {"time": 9.0, "kind": "epoch", "epoch": number, "metrics": {"top1": 0.5}, "seconds": 3.0, "ranks": ranks}


def shown(*folders: Path) -> str:
    names = report._names(folders)
    return report.page([report_data.read(one, name) for one, name in zip(folders, names, strict=True)])


def charts(page: str) -> dict[str, Any]:
    """Returns the columns of each chart's data."""
    (text,) = re.findall(r'<script type="application/json" id="plots">(.*?)</script>', page)
    return {plot["target_id"]: columns(plot["doc"]["roots"][0]["attributes"]) for plot in json.loads(text)}


def columns(attributes: dict[str, Any]) -> dict[str, Any]:
    sources = [renderer["attributes"]["data_source"] for renderer in attributes["renderers"]]
    return dict(sources[0]["attributes"]["data"]["entries"])


def rows(page: str) -> dict[str, list[str]]:
    """Returns the values of the page's tables by the name of their row."""
    found = re.findall(r'<tr><th scope="row"[^>]*>(.*?)</th>(.*?)</tr>', page)
    return {name: re.findall("<td[^>]*>(.*?)</td>", values) for name, values in found}


def test_charts_have_the_data_of_the_run(tmp_path: Path) -> None:
    page = shown(write(tmp_path / "a", [{"time": 0.0, "kind": "start", "size": 2}, *steps(1, 2, 4), epoch(EVEN, EVEN)]))
    found = charts(page)
    assert found["loss"]["x"] == [[8, 16, 32]] and found["loss"]["y"] == [[1, 0.5, 0.25]]
    assert set(found) == {"loss", "lr", "samples_per_s", "ranks-0", "time-0"}
    assert found["ranks-0"]["backward"] == [2.0, 2.0] and found["ranks-0"]["label"] == ["0", "1"]
    assert sum(found["time-0"][phase][0] for phase in EVEN) == pytest.approx(3500.0)
    assert rows(page)["top1 by epoch"] == ["0.5"] and rows(page)["samples/s (median)"] == ["100"]
    assert page.count('"attributes": {"start": 0}') == 3, "the y axis of lr, samples/s and step time"


def test_a_short_run_has_numbers_and_no_chart_or_advice_of_one_value(tmp_path: Path) -> None:
    save = {"time": 8.0, "kind": "checkpoint", "step": 1, "blocked_s": 0.25, "sealed_s": 0.5}
    verdict = {"verdict": "input bound: 90 %", "top1": 0}
    page = shown(write(tmp_path / "a", [*steps(1), save, epoch(EVEN)], result=verdict))
    assert charts(page) == {} and "median" not in page.split("<script>")[0]
    assert "No advice: the run is too short." in page and "input bound" not in page
    assert rows(page)["training loss"] == ["1"] and rows(page)["learning rate"] == ["0.1"]
    assert rows(page)["samples per second of all ranks"] == ["100"] and rows(page)["result.top1"] == ["0"]
    assert rows(page)["training paused by checkpoints (s)"] == ["0.25"] and rows(page)["failed checkpoints"] == ["0"]
    page = shown(write(tmp_path / "fast", [*steps(*range(1, 99)), epoch({"forward": 0.4})], result=verdict))
    assert "No advice" in page
    page = shown(write(tmp_path / "long", [*steps(*range(1, 99)), epoch(EVEN)], result=verdict))  # the twin
    assert "No advice" not in page and "input bound: 90 %" in page


def test_a_straggler_and_a_slow_input_are_named(tmp_path: Path) -> None:
    slow = EVEN | {"backward": 4.0, "communication": 0.3}
    waits = EVEN | {"communication": 2.3}
    trained = steps(*range(1, 11))
    page = shown(write(tmp_path / "straggler", [*trained, epoch(waits, waits, slow)]))
    assert "spent waiting for rank 2" in page
    page = shown(write(tmp_path / "hungry", [*trained, epoch(EVEN | {"input": 3.0}, EVEN | {"input": 3.0})]))
    assert "input bound" in page
    page = shown(write(tmp_path / "even", [*trained, epoch(EVEN, EVEN)]))  # the twin
    assert "waiting for rank" not in page and "input bound" not in page
    # one slow epoch among good ones
    hungry = EVEN | {"input": 3.0}
    many = [*[epoch(EVEN, EVEN)] * 20, epoch(hungry, hungry, number=2)]
    assert "epoch 3: input bound" in shown(write(tmp_path / "late", [*trained, *many]))


def test_a_step_that_a_resumed_run_repeats_counts_once(tmp_path: Path) -> None:
    resumed = [*steps(1, 2, 3), {"time": 5.0, "kind": "resume", "earlier_status": "killed"}, *steps(3, 4, loss=7.0)]
    page = shown(write(tmp_path / "run", resumed, attempts=[{}, {}]))
    loss = charts(page)["loss"]
    assert loss["x"] == [[8, 16, 24, 32]] and loss["y"] == [[1, 0.5, 7, 7]]
    assert "earlier_status: killed" in page and rows(page)["starts"] == ["2"]


def test_several_runs_show_what_differs_first(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / name / "run", steps(1, 2, 3, samples_per_s=rate), config={"lr": lr, "epochs": 3})
        for name, rate, lr in (("x", 100.0, 0.1), ("y", 250.0, 0.2))
    ]
    page = shown(*folders)
    assert charts(page)["loss"]["run"] == ["x/run", "y/run"]
    differences, same = page.split("Advice</h2>")[0], page.split('id="settings"')[1]
    assert rows(differences)["speed relative to x/run"] == ["1.00", "2.50"]
    assert rows(differences)["config.lr"] == ["0.1", "0.2"] and "config.epochs" not in differences
    assert rows(same)["config.epochs"] == ["3"] and rows(same)["steps"] == ["3"] and "config.lr" not in same
    assert same.split("<table")[0].count("<details>") == 1, "folded away"


def test_texts_of_a_run_stay_text(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    metrics = [epoch(EVEN, number=number) | {"metrics": {bad: 1.0}} for number in (0, 1)]
    events = [*steps(1), {"time": 3.0, "kind": bad, "text": bad}, *metrics]
    page = shown(write(tmp_path / "run", events, config={"name": bad}, result={"verdict": bad}))
    assert "<img src=x" not in page and "metric-0" in charts(page) and "unsafe-eval" not in page.split("<script>")[0]
    assert "Content-Security-Policy" in page and "default-src 'none'" in page


def test_odd_runs_have_a_page(tmp_path: Path) -> None:
    assert charts(shown(write(tmp_path / "empty", []))) == {}
    odd = [*steps(1, 2), *steps(3, loss="nan"), *steps(4, loss="-inf"), *steps(5, loss=None)]
    nan = {"type": "number", "value": "nan"}  # Bokeh draws no chart that has an infinity
    assert charts(shown(write(tmp_path / "nan", odd)))["loss"]["y"] == [[1, 0.5, nan, nan]]
    page = shown(write(tmp_path / "diverged", steps(1, 2, 3, loss="nan")))
    assert "loss" not in charts(page) and rows(page)["training loss"] == ["nan"]
    failed = shown(write(tmp_path / "failed", steps(1), status="failed", error="ValueError: at the gate"))
    assert "ValueError: at the gate" in failed and "cause of the failure" in failed


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    trained = [its | {"loss": 1 / 3 + its["step"], "lr": its["step"] / 7} for its in steps(*range(1, 5001))]
    page = shown(write(tmp_path / "many", [*trained, epoch(*[EVEN] * 100)]))
    found = charts(page)
    assert 250 < len(found["loss"]["x"][0]) <= report_data.MOST_POINTS
    assert len(found["ranks-0"]["label"]) == 64 and "first 64 of 100 ranks" in page
    assert len(page.encode()) <= 1_500_000


FOREIGN = (
    "null", "[]", '"x"', '{"kind": []}', '{"kind": "step", "step": "x"}', '{"kind": "step", "time": NaN}',
    '{"kind": "epoch", "epoch": 1, "ranks": [null]}', '{"time": null, "kind": "start"}',
    '{"time": 1e400, "kind": "start"}', '{"kind": "epoch", "ranks": 7}', '{"kind": "x", "text": "\\ud800"}',
)  # fmt: skip


def test_foreign_lines_harm_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, line in enumerate(FOREIGN):
        run = write(tmp_path / f"run-{number}", steps(1, 2), world={"size": 1}, config={})
        with open(run / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")
    assert main(["report", str(tmp_path)]) == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "a", steps(1))
    write(tmp_path / "runs" / "b", steps(1))
    assert main(["report", "runs/a"]) == 0 and (tmp_path / "runs/a/report.html").is_file()
    assert main(["report", "runs"]) == 0
    assert "<bdi>a</bdi>, <bdi>b</bdi></h1>" in (tmp_path / "report.html").read_text()
    capsys.readouterr()
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "run.json").write_text("{")
    assert main(["report", "runs/c"]) == 2 and "must be JSON" in capsys.readouterr().err
    assert main(["report", "runs"]) == 0
    assert "skipped: runs/c/run.json" in capsys.readouterr().err
    assert main(["report", "runs/a/run.json"]) == 2 and "no run.json in runs/a/run.json" in capsys.readouterr().err
    assert main(["report", "nowhere"]) == 2 and "no run.json in nowhere" in capsys.readouterr().err
    assert main(["report", "runs/a", "--out", "no/such/file"]) == 2 and "--out FILE" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", ".", "/", "full", "no/such/file", "a/run.json/page", "x" * 300])
def test_what_cannot_be_written_is_refused(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", steps(1))
    (tmp_path / "full").symlink_to("/dev/full")
    assert main(["report", "a", "--out", out]) == 2
    assert "--out names a file that can be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "full"] and (tmp_path / "full").is_char_device()
