"""`hvdtrain bench train --tune` on two real ranks: what it finds, throws out and writes; never how long that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, Result, run_ranks

PROGRAM = PROGRAMS / "torch" / "tuned.py"


def tuned(out: Path, knobs: dict[str, list[str]], *flags: str, **env: str) -> tuple[Result, dict[str, Any]]:
    words: list[str | Path] = [PROGRAMS / "torch" / "tune_knobs.py", json.dumps(knobs), "--out", out, *flags]
    done = run_ranks(words, 1, launcher="none", env=env, timeout_s=400).check()
    return done, json.loads(out.read_text())


@pytest.mark.thorough
@pytest.mark.slow
def test_a_bad_setting_is_found_and_the_file_is_read(tmp_path: Path) -> None:
    """Each update waits for a cycle of 200 ms; what fails or trains otherwise is thrown out."""
    knobs = {"HOROVOD_CYCLE_TIME": ["1"], "HVDTRAIN_BUCKET_BYTES": ["many"], "RATE": ["0.02"]}
    out = tmp_path / "tuned.json"
    done, found = tuned(out, knobs, "--", "python", str(PROGRAM), "1000", HOROVOD_CYCLE_TIME="200")
    assert found["start"]["HOROVOD_CYCLE_TIME"] == "200" and found["tuned"]["HOROVOD_CYCLE_TIME"] == "1", done.text
    assert found["ratio"]["high"] < 1 and found["verdict"] == "faster"
    outcomes = {trial["knob"]: trial["outcome"] for trial in found["trials"]}
    assert outcomes["HOROVOD_CYCLE_TIME"] == "faster"
    assert outcomes["HVDTRAIN_BUCKET_BYTES"].startswith("thrown out: ") and "bytes" in outcomes["HVDTRAIN_BUCKET_BYTES"]
    assert outcomes["RATE"].startswith("thrown out: another result")
    assert "HOROVOD_CYCLE_TIME=200 is set in this environment, and wins over the file: unset it" in done.out
    for env, shown in (({}, "1"), ({"HOROVOD_CYCLE_TIME": "3"}, "3")):
        after = run_ranks([PROGRAM, "2"], 2, launcher="horovodrun", env={"HVDTRAIN_TUNED": str(out), **env}).check()
        assert all(f"started with HOROVOD_CYCLE_TIME={shown} " in text for text in after.ranks_output.values())
        assert f"tuned by {out} under horovodrun: " in after.ranks_error[0], after.text
    launch: list[str | Path] = ["-m", "hvdtrain", "launch", "-np", "2", "--tuned", out, "--", "python", PROGRAM, "2"]
    after = run_ranks(launch, 1, launcher="none", cwd=tmp_path).check()
    assert after.out.count("started with HOROVOD_CYCLE_TIME=1 ") == 2, after.text


def test_what_does_not_train_through_prepare_is_refused(tmp_path: Path) -> None:
    words = [
        "-m",
        "hvdtrain",
        "bench",
        "train",
        "--tune",
        "--out",
        str(tmp_path / "tuned.json"),
        "--",
        "python",
        "-c",
        "0",
    ]
    done = run_ranks(words, 1, launcher="none")
    assert done.returncode == 2 and "must train through hvdtrain's prepare()" in done.err, done.text
    assert "it ended with 0" in done.err and not (tmp_path / "tuned.json").exists()
