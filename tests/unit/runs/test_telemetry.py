"""The run log: what a run leaves behind, however it ends."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from run_logs import one_step, open_log, strict

from hvdtrain import LR, ConfigError
from hvdtrain.record.log import read_run
from hvdtrain.record.log_files import EVENT_EVERY_S, Line, Window, write_json


class TestRecord:
    def test_run_json_tells_what_ran(self, tmp_path: Path) -> None:
        config = {"per_rank_batch": 32, "accumulate": 2, "lr": LR(0.1, 32), "data": Path("/data"), "epochs": 3}
        with open_log(tmp_path / "run", config=config) as log:
            running = read_run(log.run_dir)
            log.result(accuracy=np.float32(0.5))
            log.result(loss=math.nan)
        assert running is not None and running["status"] == "running"
        run = read_run(tmp_path / "run")
        assert run is not None
        assert run["status"] == "finished" and run["ended"] and run["error"] is None
        assert run["effective_batch"] == 64
        assert run["lr"]["base"] == 0.1 and run["lr"]["scale"] == "linear"
        assert run["config"]["data"] == "/data"
        assert run["result"] == {"accuracy": 0.5, "loss": "nan"}
        assert run["world"]["size"] == 1 and run["launcher"] == "none"
        assert run["versions"]["python"].startswith("3.") and run["versions"]["numpy"] == np.__version__

    def test_a_metric_is_one_number(self, tmp_path: Path) -> None:
        with open_log(tmp_path) as log:
            log.epoch(0, {"loss": np.float32(0.5), "best": None, "worst": math.nan}, 1.0)  # type: ignore[dict-item]
            for value in (np.zeros(2), "good", [1.0]):
                with pytest.raises(ConfigError, match="confusion="):
                    log.epoch(0, {"confusion": value}, 1.0)  # type: ignore[dict-item]
        assert sum(event["kind"] == "epoch" for event in strict(tmp_path / "events.jsonl")) == 1

    def test_events(self, tmp_path: Path) -> None:
        with open_log(tmp_path) as log:
            log.event("note", text="hello", shape=(2, 3))
            one_step(log, 1, input=0.25, compute=0.5)
            log.epoch(0, {"loss": 0.5}, 1.5)
        events = strict(tmp_path / "events.jsonl")
        assert [event["kind"] for event in events] == ["start", "note", "step", "epoch", "end"]
        assert events[1]["shape"] == [2, 3]
        step = events[2]
        assert (step["step"], step["samples_seen"], step["loss"], step["lr"]) == (1, 32, 1.0, 0.1)
        assert step["seconds"] == {"input": 0.25, "compute": 0.5} and step["samples_per_s"] > 0
        assert events[3]["ranks"] == [{"input": 0.25, "compute": 0.5}]
        assert all(isinstance(event["time"], float) for event in events)

    def test_quick_steps_share_events_and_nothing_is_lost(self, tmp_path: Path) -> None:
        with open_log(tmp_path) as log:
            start = time.perf_counter()
            for step in range(1, 2001):
                one_step(log, step, loss=float(step), compute=1.0)
            seconds = time.perf_counter() - start
        steps = [event for event in strict(tmp_path / "events.jsonl") if event["kind"] == "step"]
        assert len(steps) <= 2 + seconds / EVENT_EVERY_S
        assert sum(event["steps"] for event in steps) == 2000
        assert sum(event["samples"] for event in steps) == 2000 * 32
        assert sum(event["seconds"]["compute"] for event in steps) == 2000
        mean = sum(event["loss"] * event["steps"] for event in steps) / 2000
        assert mean == pytest.approx(1000.5)

    def test_nan_and_infinity_stay_strict_json(self, tmp_path: Path) -> None:
        with open_log(tmp_path) as log:
            one_step(log, 1, loss=math.nan)
            log.event(
                "values", a=math.inf, b=[-math.inf, np.nan], c={"d": np.float64("inf")}, e=np.array([1.0, np.nan])
            )
            log.epoch(0, {"loss": math.nan}, 1.0)
            log.result(loss=math.inf)
        events = strict(tmp_path / "events.jsonl")
        assert math.isnan(float(events[1]["loss"]))
        assert (events[2]["a"], events[2]["b"], events[2]["c"], events[2]["e"]) == (
            "inf", ["-inf", "nan"], {"d": "inf"}, [1.0, "nan"],
        )  # fmt: skip
        strict_run = json.loads((tmp_path / "run.json").read_text(), parse_constant=lambda c: pytest.fail(c))
        assert strict_run["result"] == {"loss": "inf"}


class TestEnds:
    @pytest.mark.parametrize("error", [ValueError("no such luck"), KeyboardInterrupt(), SystemExit(2)])
    def test_an_exception_marks_the_run_failed_and_passes_on(self, tmp_path: Path, error: BaseException) -> None:
        with pytest.raises(type(error)), open_log(tmp_path):
            raise error
        run = read_run(tmp_path)
        assert run is not None and run["status"] == "failed"
        assert run["error"].startswith(type(error).__name__)
        assert strict(tmp_path / "events.jsonl")[-1]["status"] == "failed"

    def test_run_json_is_replaced_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        write_json(path, {"a": 1})

        class Unprintable:
            def __str__(self) -> str:
                raise RuntimeError("cannot be written")

        with pytest.raises(RuntimeError):
            write_json(path, {"a": Unprintable()})
        assert json.loads(path.read_text()) == {"a": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_the_first_progress_line_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    line = Line(None)
    fields = {"epoch": 0, "step": 7, "loss": 0.5, "lr": None, "samples": 600, "samples_per_s": 1200.0}
    line.show({**fields, "step": 1, "samples_per_s": 2.0})
    assert capsys.readouterr().out == "epoch 1 step 1  loss 0.5\n", "it compiles"
    line._due = 1.0
    line.show(fields)
    assert capsys.readouterr().out == "epoch 1 step 7  loss 0.5  1,200 samples/s\n"


def test_micro_batches_of_an_update_are_one_step_and_their_time_counts():
    window = Window()
    position = {"step": 1, "epoch": 0, "samples_seen": 64, "lr": 0.1}
    window._due = 0.0  # an event would be due at once
    assert not window.add(position, None, 0, {"forward": 0.5}), "no update is complete"
    assert window.add(position, 2.0, 64, {"forward": 0.5, "optimizer": 1.0})
    fields = window.take()
    assert (fields["steps"], fields["samples"], fields["loss"]) == (1, 64, 2.0)
    assert fields["seconds"] == {"forward": 1.0, "optimizer": 1.0} and fields["samples_per_s"] == 32.0


class TestVerdict:
    def test_it_is_the_last_word_over_all_epochs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with open_log(tmp_path, progress=True) as log:
            one_step(log, 0, forward=99.0)  # it compiles, which is no step's time
            for epoch, phases in enumerate(({"input": 9.0, "forward": 1.0}, {"input": 1.0, "forward": 9.0})):
                one_step(log, epoch + 1, **phases)
                log.epoch(epoch, {}, 10.0)
            print("the program's own")
        said = "input bound: 50 % of each step waits for data; "  # the advice depends on the idle cores
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"verdict: {said}")
        run = read_run(tmp_path)
        assert run is not None and run["result"]["verdict"].startswith(said)
        assert run["result"]["shares"]["input"] == 0.5

    def test_nothing_is_said_of_nothing_or_where_the_error_is_the_last_word(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_log(tmp_path / "none", progress=True):
            pass
        with open_log(tmp_path / "quiet") as log:
            one_step(log, 1, forward=1.0)
        with pytest.raises(ZeroDivisionError), open_log(tmp_path / "failed", progress=True) as log:
            one_step(log, 1, forward=1.0)
            raise ZeroDivisionError
        assert "verdict" not in capsys.readouterr().out
        verdicts = ["verdict" in read_run(tmp_path / name)["result"] for name in ("none", "quiet", "failed")]  # type: ignore[index]
        assert verdicts == [False, True, False]
