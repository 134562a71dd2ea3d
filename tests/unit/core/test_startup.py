"""Flags, imports, cores and run directories, before any framework is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hvdtrain.core import flags, launchers
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.core.launchers import Detected
from hvdtrain.record import folder
from hvdtrain.world import startup


def test_flag_types() -> None:
    assert flags.whole(1)("12") == 12 and flags.whole(0)("0") == 0 and flags.positive("1e-3") == 0.001
    assert flags.at_least_0("0") == 0 and flags.at_least_0("2.5") == 2.5
    for parse, text in (
        [(flags.whole(1), t) for t in ("0", "-1", "1.5", "x", "")]
        + [(flags.positive, t) for t in ("0", "-1", "nan", "inf", "x")]
        + [(flags.at_least_0, t) for t in ("-1e-9", "nan", "inf", "x")]
    ):
        with pytest.raises(Exception, match="must be a"):
            parse(text)


def test_missing_modules_are_all_named_before_any_is_imported() -> None:
    needed = {"json": "never", "hvdtrain_no_such": "do a", "horovod_no_such.torch": "do b"}
    with pytest.raises(LauncherError) as caught:
        startup.find_modules(needed)
    assert "no hvdtrain_no_such, horovod_no_such in " + sys.executable in caught.value.received
    assert caught.value.remedy == "do a && do b"


def test_cores_are_shared_and_the_users_choice_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    startup.share_cores(Detected("horovodrun", 0, 6, 0, 3, 0, None))
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "2" and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.delenv("OMP_NUM_THREADS")
    startup.share_cores(Detected("mpirun", 0, 4, 0, 4, 0, None))
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("rule"), 2), (OSError("no space left"), 1), (KeyboardInterrupt(), 2)]
)
def test_a_fault_and_a_refusal_end_with_different_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that starts jobs again must not do so with what would be refused again."""

    def work(detected: Detected) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        startup.run_program("program", work)
    assert ended.value.code == code and "program: rank 0: " in capsys.readouterr().err


# ---- run directories


def put_run(folder: Path, **config: object) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": config, "status": "finished"}))


def choose(wanted: Path | None = None, *, resume: bool = False, data: str = "d") -> Path:
    return folder.choose_run_dir(wanted, "prog", resume=resume, data_sha256=data)


def test_next_free_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose() == Path("runs/prog-1")
    assert choose() == Path("runs/prog-2")  # claimed, though empty
    (tmp_path / "runs" / "prog-9").mkdir()
    (tmp_path / "runs" / "prog-x").mkdir()
    assert choose() == Path("runs/prog-10")
    assert choose(Path("own")) == Path("own")


def test_resume_takes_the_newest_or_the_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put_run(Path("runs/prog-9"), data_sha256="d")
    put_run(Path("runs/prog-10"), data_sha256="d")
    assert choose(resume=True) == Path("runs/prog-10")
    assert choose(Path("runs/prog-9"), resume=True) == Path("runs/prog-9")


def test_resume_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run in"):
        choose(resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        choose(Path("file"), resume=True)
    put_run(Path("other"), data_sha256="e", data="cats")
    with pytest.raises(ConfigError, match="trained on other data: cats"):
        choose(Path("other"), resume=True)


def test_run_directory_is_checked_early(tmp_path: Path) -> None:
    folder.check_run_dir(tmp_path / "new" / "run", resume=False)
    put_run(tmp_path / "ended")
    folder.check_run_dir(tmp_path / "ended", resume=True)
    with pytest.raises(ConfigError, match="holds a run that is finished"):
        folder.check_run_dir(tmp_path / "ended", resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="user can write"):
        folder.check_run_dir(tmp_path / "file" / "run", resume=False)


# ---- a job that was started again


def put_own_run(folder: Path, job: str | None, **config: object) -> None:
    put_run(folder, **config)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"attempts": [{"job": "before"}, {"job": job}]}))


@pytest.fixture
def started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HVDTRAIN_JOB", "ours")
    monkeypatch.setenv("HVDTRAIN_RESTART", "1")
    return monkeypatch


def choose_again(wanted: Path | None = None) -> tuple[Path, bool]:
    return folder.choose_run(wanted, "prog", resume=False, data_sha256="d")


def test_a_restarted_job_goes_on_with_its_own_run(started_again: pytest.MonkeyPatch) -> None:
    put_own_run(Path("runs/prog-9"), "ours", data_sha256="d")
    put_own_run(Path("runs/prog-10"), "theirs", data_sha256="d")
    assert choose_again() == (Path("runs/prog-9"), True)
    assert choose_again(Path("runs/prog-9")) == (Path("runs/prog-9"), True)
    folder.check_run_dir(Path("runs/prog-9"), resume=False)
    with pytest.raises(ConfigError, match="holds a run that is finished"):
        folder.check_run_dir(Path("runs/prog-10"), resume=False)
    started_again.setenv("HVDTRAIN_RESTART", "0")  # the first time it is a new run
    assert choose_again() == (Path("runs/prog-11"), False)
    with pytest.raises(ConfigError, match="holds a run that is finished"):
        folder.check_run_dir(Path("runs/prog-9"), resume=False)


def test_a_restarted_job_with_several_runs_must_say_which(started_again: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        put_own_run(Path(f"runs/prog-{number}"), "ours", data_sha256="d")
    with pytest.raises(ConfigError) as caught:
        choose_again()
    assert "runs/prog-1, runs/prog-2" in caught.value.received and "--run-dir" in caught.value.remedy
    assert choose_again(Path("runs/prog-2")) == (Path("runs/prog-2"), True)


@pytest.mark.parametrize(
    ("environ", "count", "job"),
    [
        ({}, 0, None),
        ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "big"}, 0, "slurm-big-7"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, 2, "slurm-cluster-7"),
        ({"SLURM_JOB_ID": "7", "HVDTRAIN_JOB": "ours", "HVDTRAIN_RESTART": "3", "SLURM_RESTART_COUNT": "2"}, 3, "ours"),
        ({"HVDTRAIN_JOB": "", "HVDTRAIN_RESTART": ""}, 0, None),
    ],
)
def test_what_the_environment_says_of_restarts(environ: dict[str, str], count: int, job: str | None) -> None:
    assert (launchers.restarts(environ), launchers.job_of(environ)) == (count, job)
