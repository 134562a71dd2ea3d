"""The run log: what a run leaves behind, however it ends."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from harness import PROGRAMS, REPOSITORY, clean_environment, run_ranks
from limits import Limit
from run_logs import one_step, open_log, strict

from hvdtrain import ConfigError
from hvdtrain.record.log import read_events, read_run, run_status

FOLDER = PROGRAMS / "core"


class TestOneRunADirectory:
    def test_a_finished_run_is_not_overwritten(self, tmp_path: Path) -> None:
        with open_log(tmp_path) as log:
            log.result(accuracy=1.0)
        with pytest.raises(ConfigError, match="cannot hold two runs") as caught:
            open_log(tmp_path)
        assert "finished" in caught.value.received and "--resume" in caught.value.remedy
        assert read_run(tmp_path)["result"] == {"accuracy": 1.0}  # type: ignore[index]

    def test_resume_appends(self, tmp_path: Path) -> None:
        with open_log(tmp_path) as log:
            one_step(log, 1)
        started = read_run(tmp_path)["started"]  # type: ignore[index]
        with open_log(tmp_path, resume=True) as log:
            one_step(log, 2)
        events = strict(tmp_path / "events.jsonl")
        assert [event["kind"] for event in events] == ["start", "step", "end", "resume", "step", "end"]
        run = read_run(tmp_path)
        assert run is not None and run["started"] == started and len(run["attempts"]) == 2

    def test_in_use_names_the_owner(self, tmp_path: Path) -> None:
        (tmp_path / ".lock").write_text("pid 1 on a-host-with-a-very-long-name-that-was-here-before since 1999\n" * 3)
        with open_log(tmp_path), pytest.raises(ConfigError, match="two runs at once") as caught:
            open_log(tmp_path, resume=True)
        assert f"pid {os.getpid()} on " in caught.value.received and "since 20" in caught.value.received
        assert "1999" not in caught.value.received
        with open_log(tmp_path, resume=True):
            pass  # and free again

    def test_a_killed_run_frees_the_directory_and_is_resumed(self, tmp_path: Path) -> None:
        code = f"""
import sys
from hvdtrain import RunLog, World
log = RunLog({str(tmp_path)!r}, World.solo(), config={{}}, progress=False, tensorboard=False)
log.event("note", text="before the kill")
print("ready", flush=True)
sys.stdin.read()
"""
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environment(),
            cwd=REPOSITORY,
        )  # fmt: skip
        with child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            with pytest.raises(ConfigError, match="two runs at once") as caught:
                open_log(tmp_path, resume=True)
            assert f"pid {child.pid}" in caught.value.received
            assert run_status(tmp_path) == "running"
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert run_status(tmp_path) == "killed"
        with pytest.raises(ConfigError, match="killed"):
            open_log(tmp_path)
        with open(tmp_path / "events.jsonl", "a") as file:
            file.write('{"time": 1, "kind": "st')  # what a kill in the middle of a write leaves
        with open_log(tmp_path, resume=True):
            pass
        events = read_events(tmp_path)
        assert [event["kind"] for event in events] == ["start", "note", "resume", "end"]
        assert events[2]["earlier_status"] == "killed"
        assert run_status(tmp_path) == "finished" and run_status(tmp_path / "elsewhere") is None

    def test_every_whole_line_is_read(self, tmp_path: Path, limit: Limit) -> None:
        """Text may hold what ends a line elsewhere; a kill may cut a character in two."""
        odd = "before\u2028after \u2029 \x85 \x0b \x0c \x1c \r end"
        with open_log(tmp_path) as log:
            log.event("note", text=odd)
        with open(tmp_path / "events.jsonl", "ab") as file:
            file.write('{"kind": "cut", "text": "\u20ac'.encode()[:-1])
        assert [event.get("text") for event in read_events(tmp_path)] == [None, odd, None]
        with open_log(tmp_path, resume=True):
            pass
        assert [event["kind"] for event in read_events(tmp_path)] == ["start", "note", "end", "resume", "end"]
        limit("K11b", "read_events loses lines that hold U+2028, and fails at half a character", mended="all are read")

    def test_a_copied_run_has_no_lock(self, tmp_path: Path, limit: Limit) -> None:
        log = open_log(tmp_path)
        assert run_status(tmp_path) == "running"
        (tmp_path / ".lock").unlink()
        assert run_status(tmp_path) == "killed"
        log.finish()
        assert run_status(tmp_path) == "finished"
        limit("K11c", "run_status of a copied run without .lock fails", mended='"killed": nobody goes on writing there')

    def test_damaged_run_json(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text("{")
        with pytest.raises(ConfigError, match="must be JSON"):
            open_log(tmp_path, resume=True)
        (tmp_path / "run.json").unlink()
        with open_log(tmp_path):
            pass  # the lock was given back


class TestUnwritable:
    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("")
        for folder in (tmp_path / "run", tmp_path / "run" / "below"):
            with pytest.raises(ConfigError, match="that this user can write") as caught:
                open_log(folder)
            assert str(folder) in caught.value.received

    def test_full_later_does_not_end_the_training_and_is_told_once(
        self, tmp_path: Path, mount: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mount("tmpfs", tmp_path / "small", "size=64k")
        with open_log(tmp_path / "small" / "run") as log:
            fill(tmp_path / "small")
            for _ in range(50):
                log.event("note", text="x" * 5000)
            log.result(accuracy=1.0)
        assert capsys.readouterr().err.count("the run log in") == 1
        assert read_run(tmp_path / "small" / "run")["status"] == "running", "the old one is still whole"  # type: ignore[index]


def fill(folder: Path) -> None:
    with open(folder / "fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            return


class TestProgress:
    def test_without_a_terminal_lines_are_rare_and_epochs_are_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_log(tmp_path, progress=True) as log:
            for step in range(1, 500):
                one_step(log, step)
            log.epoch(0, {"loss": 0.5, "accuracy": 0.875}, 2.0)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("epoch 1 step 1  loss 1  lr 0.1")
        assert lines[-1] == "epoch 1 done in 2.0 s  loss 0.5  accuracy 0.875"
        assert len(lines) <= 3

    def test_on_a_terminal_it_is_a_bar(self, tmp_path: Path) -> None:
        code = f"""
from hvdtrain import RunLog, World
with RunLog({str(tmp_path)!r}, World.solo(), config={{"total_samples": 64}}, tensorboard=False) as log:
    log.step(step=1, epoch=0, samples_seen=32, loss=1.5, lr=0.1, samples=32, seconds={{}})
    log.epoch(0, {{"loss": 1.5}}, 1.0)
"""
        master, slave = os.openpty()
        try:
            termios.tcsetwinsize(slave, (24, 100))
            subprocess.run(
                [sys.executable, "-c", code], stdout=slave, stderr=slave, env=clean_environment(), check=True,
                cwd=REPOSITORY, timeout=60,
            )  # fmt: skip
            shown = os.read(master, 65536).decode()
        finally:
            os.close(slave)
            os.close(master)
        assert "epoch 1 step 1  loss 1.5" in shown and "epoch 1 done" in shown and "\r" in shown


class TestTensorBoard:
    def test_scalars_are_readable_back(self, tmp_path: Path) -> None:
        """By TensorFlow's own reader, which checks the checksums; the negative twin is a file with one bit flipped."""
        for name in ("whole", "damaged"):
            with open_log(tmp_path / name, tensorboard=True) as log:
                one_step(log, 7, loss=0.25)
                log.epoch(2, {"val_accuracy": 0.75, "nan": math.nan, "huge": 1e300}, 1.0)
        (path,) = (tmp_path / "damaged" / "tensorboard").iterdir()
        data = bytearray(path.read_bytes())
        data[60] ^= 1
        path.write_bytes(data)
        whole, damaged = read_scalars(tmp_path / "whole" / "tensorboard", tmp_path / "damaged" / "tensorboard")
        assert whole == {
            "train/loss": [[7, 0.25]], "train/lr": [[7, pytest.approx(0.1)]], "train/samples_per_s": [[7, ANY]],
            "epoch/val_accuracy": [[2, 0.75]], "epoch/nan": [[2, "nan"]], "epoch/huge": [[2, "inf"]],
        }  # fmt: skip
        assert "corrupted record" in damaged["error"]


def read_scalars(*folders: Path) -> list[dict[str, Any]]:
    """Return what TensorFlow, in a process of its own, reads from each folder: tag to [step, value] pairs."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("reads with TensorFlow, which is not installed")
    code = f"""
import glob, json, tensorflow as tf
def read(folder):
    found = {{}}
    for path in sorted(glob.glob(folder + "/*")):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                number = value.simple_value
                found.setdefault(value.tag, []).append([event.step, number if abs(number) < 1e38 else str(number)])
    return found
results = []
for folder in {[str(folder) for folder in folders]!r}:
    try:
        results.append(read(folder))
    except tf.errors.DataLossError as error:
        results.append({{"error": str(error)}})
print(json.dumps(results))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestRanks:
    def test_rank_0_writes_and_talks_and_all_learn_of_trouble(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        done = run_ranks([FOLDER / "telemetry_ranks.py", tmp_path], 2).check()
        assert "epoch 1 done" in done.ranks_output[0]
        assert "epoch 1 done" not in done.ranks_output[1]
        for rank in range(2):
            assert "refused: the run directory must be a directory" in done.ranks_output[rank], done.text
            assert "refused: a run directory cannot be used by two runs at once" in done.ranks_output[rank]
        run = read_run(tmp_path / "run")
        assert run is not None and run["world"]["size"] == 2 and run["effective_batch"] == 64
        epoch = next(event for event in strict(tmp_path / "run" / "events.jsonl") if event["kind"] == "epoch")
        assert epoch["ranks"] == [{"compute": 1.0}, {"compute": 2.0}]
        starts = [event for event in read_events(tmp_path / "run") if event["kind"] == "start"]
        assert len(starts) == 1
