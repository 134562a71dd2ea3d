"""`hvdtrain report`: what the page tells of runs, by their files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.commands import report, report_data, report_trace

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


def figures(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return json.loads(text)["charts"]


def test_curves_are_the_runs(tmp_path: Path) -> None:
    page = shown(write(tmp_path / "a", [{"time": 0.0, "kind": "start", "size": 2}, *steps(1, 2, 4), epoch(EVEN, EVEN)]))
    charts = figures(page)
    assert charts["loss"]["data"][0]["x"] == [8, 16, 32] and charts["loss"]["data"][0]["y"] == [1, 0.5, 0.25]
    assert {"lr", "samples_per_s", "metric-0", "ranks-0", "time-0"} <= set(charts) and "saves" not in charts
    assert charts["lr"]["layout"]["yaxis"]["rangemode"] == "tozero", "a constant one would seem to be 0"
    by_rank = {trace["name"]: trace["x"] for trace in charts["ranks-0"]["data"]}
    assert by_rank["backward"] == [2.0, 2.0]
    assert sum(trace["y"][0] for trace in charts["time-0"]["data"]) == pytest.approx(3500.0)


def test_a_straggler_and_a_slow_input_are_named(tmp_path: Path) -> None:
    slow = EVEN | {"backward": 4.0, "communication": 0.3}
    waits = EVEN | {"communication": 2.3}
    page = shown(write(tmp_path / "straggler", [*steps(1), epoch(waits, waits, slow)]))
    assert "spent waiting for rank 2" in page
    page = shown(write(tmp_path / "hungry", [*steps(1), epoch(EVEN | {"input": 3.0}, EVEN | {"input": 3.0})]))
    assert "input bound" in page
    page = shown(write(tmp_path / "even", [*steps(1), epoch(EVEN, EVEN)]))  # the twin
    assert "waiting for rank" not in page and "input bound" not in page
    # one slow epoch among good ones
    hungry = EVEN | {"input": 3.0}
    many = [*[epoch(EVEN, EVEN)] * 20, epoch(hungry, hungry, number=2)]
    assert "epoch 3: input bound" in shown(write(tmp_path / "late", [*steps(1), *many]))


def test_what_a_resumed_run_did_again_counts_once(tmp_path: Path) -> None:
    resumed = [*steps(1, 2, 3), {"time": 5.0, "kind": "resume", "earlier_status": "killed"}, *steps(3, 4, loss=7.0)]
    page = shown(write(tmp_path / "run", resumed, attempts=[{}, {}]))
    loss = figures(page)["loss"]["data"][0]
    assert loss["x"] == [8, 16, 24, 32] and loss["y"] == [1, 0.5, 7, 7]
    assert "earlier_status killed" in page


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / name / "run", steps(1, 2, samples_per_s=rate), config={"lr": lr, "epochs": 3})
        for name, rate, lr in (("x", 100.0, 0.1), ("y", 250.0, 0.2))
    ]
    page = shown(*folders)
    assert [trace["name"] for trace in figures(page)["loss"]["data"]] == ["x/run", "y/run"]
    assert "<td>2.50</td>" in page
    assert re.search(r'class="differs"><th scope="row">config.lr<', page)
    assert re.search(r'<tr><th scope="row">config.epochs<', page)


def test_texts_of_a_run_stay_text(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    events = [*steps(1), {"time": 3.0, "kind": bad, "text": bad}, epoch(EVEN) | {"metrics": {bad: 1.0}}]
    page = shown(write(tmp_path / "run", events, config={"name": bad}, result={"verdict": bad}))
    assert "<img src=x" not in page and figures(page)["metric-0"]["layout"]["yaxis"]["title"]["text"] == bad
    assert "Content-Security-Policy" in page and "default-src 'none'" in page


def test_odd_runs_have_a_page(tmp_path: Path) -> None:
    assert figures(shown(write(tmp_path / "empty", []))) == {}
    assert figures(shown(write(tmp_path / "nan", [*steps(1, loss="nan"), *steps(2, loss=None)])))["loss"]
    failed = shown(write(tmp_path / "failed", steps(1), status="failed", error="ValueError: at the gate"))
    assert "ValueError: at the gate" in failed and "why it ended" in failed
    many = shown(write(tmp_path / "many", [*steps(*range(1, 5001)), epoch(*[EVEN] * 100)]))
    charts = figures(many)
    assert len(charts["loss"]["data"][0]["x"]) <= report_data.MOST_POINTS
    assert len(charts["ranks-0"]["data"][0]["x"]) == 64 and "first 64 of 100 ranks" in many


def of_rank(events: list[dict[str, Any]], rank: int, row: int) -> list[tuple[str, float, float]]:
    mine = [its for its in events if (its["pid"], its.get("tid"), its["ph"]) == (rank, row, "X")]
    return [(its["name"], its["ts"], its["dur"]) for its in mine]


def test_a_trace_has_phases_where_they_were(tmp_path: Path) -> None:
    marks = [(101.0, "input"), (101.5, "forward"), (102.0, "other"), (102.25, "update 1"), (103.0, "update 2")]
    other = [(101.25, "input"), (102.5, "update 1")]
    log = [its | {"time": 105.0} for its in steps(2)[:1]]
    log[0]["seconds"] = {"input": 1.0, "forward": 3.0}
    events = [*log, {"time": 106.0, "kind": "marks", "ranks": [marks, other]},
              {"time": 107.0, "kind": "checkpoint", "sealed_s": 0.5, "blocked_s": 0.1}]  # fmt: skip
    run = write(tmp_path / "a", events)
    timeline = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 100_000_000}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.w"}},
        {"ph": "B", "name": "ALLREDUCE", "ts": 1_750_000, "pid": 1},
        {"ph": "E", "ts": 1_800_000, "pid": 1},
    ]
    text = "[\n" + ",\n".join(map(json.dumps, timeline))
    damaged = '{"ph": "B", "na'  # as a job that was killed leaves its last line
    (run / "horovod-timeline.json").write_text(text.replace("\n", f"\n{damaged}\n", 1) + f",\n{damaged}")
    found = report_trace.trace(run)["traceEvents"]
    assert of_rank(found, 0, 0) == [("input", 0.0, 5e5), ("forward", 5e5, 5e5), ("other", 1e6, 1e6)]
    assert of_rank(found, 0, 1) == [("update 1", 0.0, 1.25e6), ("update 2", 1.25e6, 7.5e5)]
    assert of_rank(found, 1, 0) == [("input", 2.5e5, 1.25e6)] and of_rank(found, 1, 1) == [("update 1", 2.5e5, 1.25e6)]
    assert of_rank(found, 0, 2) == [("input", 0.0, 1e6), ("forward", 1e6, 3e6)]
    assert of_rank(found, 0, 3) == [("checkpoint", 5.5e6, 5e5)]
    horovod = [its for its in found if its["pid"] == report_trace.HOROVOD + 1]
    assert [(its["ph"], its.get("ts")) for its in horovod] == [("M", None), ("B", 7.5e5), ("E", 8e5)]
    assert {its["args"]["name"] for its in found if its.get("name") == "process_name"} == {
        "rank 0", "rank 1", "Horovod: allreduce.w",
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "null", "[]", '"x"', '{"kind": []}', '{"kind": "step", "step": "x"}', '{"kind": "step", "time": NaN}',
        '{"kind": "epoch", "epoch": 1, "ranks": [null]}', '{"kind": "marks", "ranks": [null, "x"]}',
        '{"time": null, "kind": "start"}', '{"time": 1e400, "kind": "start"}', '{"kind": "epoch", "ranks": 7}',
        '{"kind": "x", "text": "\\ud800"}',
    ],
)  # fmt: skip
def test_foreign_lines_harm_no_report(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "a", steps(1, 2), world={"size": 1}, config={})
    with open(run / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert main(["report", str(run)]) == 0 and main(["report", str(run), "--trace"]) == 0
    json.loads((run / "trace.json").read_text(), parse_constant=pytest.fail)
    assert main(["scale", str(run), "--gradients", "1MB"]) == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "a", steps(1))
    write(tmp_path / "runs" / "b", steps(1))
    assert main(["report", "runs/a"]) == 0 and (tmp_path / "runs/a/report.html").is_file()
    assert main(["report", "runs"]) == 0 and "x a" in (tmp_path / "report.html").read_text()
    capsys.readouterr()
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "run.json").write_text("{")
    assert main(["report", "runs/c"]) == 2 and "must be JSON" in capsys.readouterr().err
    assert main(["report", "runs", "--trace"]) == 0
    said = capsys.readouterr()
    assert "left out: runs/c/run.json" in said.err and len(said.out.split()) == 2
    for folder in said.out.split():
        assert json.loads(Path(folder).read_text())["traceEvents"]
    assert main(["report", "runs/a", "--trace", "--out", "x"]) == 2 and "RUN/trace.json" in capsys.readouterr().err
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
