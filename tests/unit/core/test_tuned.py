"""Settings that `hvdtrain bench train --tune` wrote: who wins, where they hold, what is refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.comm.engines import SoloEngine
from hvdtrain.commands import launch
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.launchers import ALONE, Detected
from hvdtrain.world import join, startup

TWO = Detected("horovodrun", 0, 2, 0, 2, 0, None)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*startup.TUNABLE, variables.TUNED, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)


def write(path: Path, **changes: Any) -> Path:
    content = {"tuned": {"HOROVOD_CYCLE_TIME": "3", "OMP_NUM_THREADS": "7"}, "fits": startup.machine_shape(2)}
    path.write_text(json.dumps(content | {"launcher": "horovodrun"} | changes))
    return path


def test_the_file_is_read_once_and_rank_0_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=threads.append))
    monkeypatch.setenv(variables.TUNED, str(write(tmp_path / "tuned.json")))
    startup.use_tuned(TWO)
    assert (os.environ["HOROVOD_CYCLE_TIME"], os.environ["OMP_NUM_THREADS"], threads) == ("3", "7", [7])
    assert "under horovodrun: HOROVOD_CYCLE_TIME=3; OMP_NUM_THREADS=7\n" in capsys.readouterr().err
    startup.use_tuned(TWO)
    assert capsys.readouterr().err == "" and threads == [7]
    monkeypatch.setenv(variables.TUNED, str(tmp_path / "tuned.json"))
    startup.use_tuned(Detected("horovodrun", 1, 2, 1, 2, 0, None))
    assert capsys.readouterr().err == ""


def test_programs_have_it_before_their_own_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=lambda count: None))
    monkeypatch.setenv(variables.TUNED, str(write(tmp_path / "tuned.json")))
    startup.share_cores(TWO)
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_scripts_have_it_from_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.TUNED, str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="tuned settings are a file"):
        join.init("torch")


def test_what_is_set_in_the_environment_wins(tmp_path: Path) -> None:
    path = write(tmp_path / "tuned.json")
    found, text = startup.tuned(path, {"HOROVOD_CYCLE_TIME": "9"}, 2)
    assert found == {"OMP_NUM_THREADS": "7"}
    assert "OMP_NUM_THREADS=7; HOROVOD_CYCLE_TIME=9 stays as it is set (tuned: 3)" in text
    found, text = startup.tuned(path, {"HOROVOD_CYCLE_TIME": "3", "OMP_NUM_THREADS": "7"}, 2)
    assert found == {} and text.endswith("nothing to set")


@pytest.mark.parametrize("change", [{"cores": "96"}, {"ranks a host": "4"}, {"torch": "1.0"}, {"hvdtrain": "0"}])
def test_a_file_for_something_else_is_not_used(tmp_path: Path, change: dict[str, str]) -> None:
    """It never changes results: so it is told, not refused."""
    path = write(tmp_path / "tuned.json", fits=startup.machine_shape(2) | change)
    found, text = startup.tuned(path, {}, 2)
    (name, value), here = next(iter(change.items())), startup.machine_shape(2)
    assert found == {} and "is not used" in text and f"({name}: {value}, here {here.get(name)})" in text
    assert startup.tuned(write(path), {}, 3)[0] == {}


@pytest.mark.parametrize(
    "changes",
    [{"tuned": {"CUDA_VISIBLE_DEVICES": "1"}}, {"tuned": {"OMP_NUM_THREADS": 7}}, {"tuned": None}, {"fits": 3}],
    ids=["another variable", "a number", "nothing", "no machine"],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hvdtrain bench train --tune wrote") as caught:
        startup.tuned(write(tmp_path / "tuned.json", **changes), {}, 2)
    assert caught.value.shared
    (tmp_path / "tuned.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="hvdtrain bench train --tune wrote"):
        startup.tuned(tmp_path / "tuned.json", {}, 2)


def test_launch_passes_them_to_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    flags = ["-np", "4", "-H", "one:2,two:2", "--tuned", str(write(tmp_path / "tuned.json"))]
    job = launch.job_of(parser.parse_args([*flags, "-x", "OMP_NUM_THREADS=5", "--", "true"]), {})
    assert (job.env["HOROVOD_CYCLE_TIME"], job.env["OMP_NUM_THREADS"]) == ("3", "5")
    assert "OMP_NUM_THREADS=5 stays" in capfd.readouterr().err
    assert "HOROVOD_CYCLE_TIME" not in launch.job_of(parser.parse_args(["-np", "4", "--", "true"]), {}).env


class _Differs(SoloEngine):
    """A rank whose neighbour has another environment."""

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data, data.replace(b"1048576", b"2097152")]


def test_ranks_that_would_send_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    join._meet(_Differs(), "torch", 0, ALONE)[1].close()
    monkeypatch.setenv("HVDTRAIN_BUCKET_BYTES", "1048576")
    with pytest.raises(ReplicaError, match="environment must be the same on every rank") as caught:
        join._meet(_Differs(), "torch", 0, ALONE)
    assert "rank 1: HVDTRAIN_BUCKET_BYTES='2097152'" in caught.value.received
