"""The Horovod recipe: its edits, its refusals, its cache, and the Horovod that the set-up installed with it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import build, edits, environment, support

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> Path:
    """The real source distribution: from the set-up's cache, else from PyPI."""
    cache = build.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    return build.fetch_sdist(cache, build.Steps(tmp_path_factory.mktemp("log") / "log", print))


@pytest.fixture(scope="session")
def unpacked(sdist, tmp_path_factory) -> Path:
    return build.unpack(sdist, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture
def source(unpacked, tmp_path) -> Path:
    """The files that are edited, a copy for each test: the whole is 3700 files, most of them other projects'."""
    for file in {edit.file for edit in edits.EDITS}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(unpacked / file, tmp_path / file)
    return tmp_path


def snapshot(source: Path) -> dict[str, bytes]:
    return {edit.file: (source / edit.file).read_bytes() for edit in edits.EDITS}


@pytest.mark.parametrize("gpu", ["none", "nccl"])
def test_every_edit_finds_its_target_once(source, gpu):
    applied = edits.apply(source, edits.applicable(edits.Target(gpu)))
    for edit in applied:
        assert edit.replace in (source / edit.file).read_text(), edit.name


def test_cuda_edits_depend_on_the_target():
    names = {gpu: {edit.name for edit in edits.applicable(edits.Target(gpu))} for gpu in ("none", "nccl")}
    assert "cuda-torch-as-cpu" in names["none"] - names["nccl"]
    assert "tensorflow-without-cuda" in names["nccl"] - names["none"]
    assert "gloo-stall-check" in names["none"] & names["nccl"]


def test_a_second_application_is_refused_and_changes_nothing(source):
    table = edits.applicable(edits.Target("none"))
    edits.apply(source, table)
    before = snapshot(source)
    with pytest.raises(HvdtrainError, match=r"edit '.*' must find its target"):
        edits.apply(source, table)
    assert snapshot(source) == before


@pytest.mark.parametrize("edit", edits.EDITS, ids=lambda edit: edit.name)
def test_an_edit_whose_target_is_gone_fails_loudly(source, edit):
    path = source / edit.file
    path.write_text(path.read_text().replace(edit.find, ""))
    before = snapshot(source)
    with pytest.raises(HvdtrainError, match=re.escape(edit.name)):
        edits.apply(source, [edit])
    assert snapshot(source) == before


def test_a_missing_file_is_named(source):
    (source / "horovod/torch/optimizer.py").unlink()
    with pytest.raises(HvdtrainError, match="the file is missing"):
        edits.apply(source, edits.EDITS)


def test_every_edit_says_why():
    assert all(len(edit.why) > 20 and edit.upstream for edit in edits.EDITS)
    assert len({edit.name for edit in edits.EDITS}) == len(edits.EDITS)
    assert all(edit.name in edits.table() for edit in edits.EDITS)


HERE = environment.Environment(
    python="3.11.7", python_tag="cpython-311", machine="x86_64", cpu_flags="avx", torch="2.12.1", torch_cuda="13.0",
    torch_cxx11=True, tensorflow="2.21.0", cmake="3.25.1", gcc="12.2.0", mpi="Open MPI 4.1.4", gpu="nccl", nccl="2.29",
)  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(environment.Environment)])
def test_the_cache_key_sees_every_field(field):
    other = dataclasses.replace(HERE, **{field: "none" if field == "gpu" else "other"})
    assert build.cache_key(other) != build.cache_key(HERE)


def test_the_cache_key_sees_source_and_edits(monkeypatch):
    key = build.cache_key(HERE)
    assert build.cache_key(HERE) == key
    assert build.cache_key(HERE, sdist_sha256="0" * 64) != key
    assert build.cache_key(HERE, cuda="wheels") != key
    changed = (dataclasses.replace(edits.EDITS[0], replace="other"), *edits.EDITS[1:])
    monkeypatch.setattr(edits, "EDITS", changed)
    assert build.cache_key(HERE) != key


def test_a_damaged_cached_wheel_is_not_used(tmp_path):
    wheel = tmp_path / "horovod.whl"
    wheel.write_bytes(b"a wheel")
    stored = build._store(wheel, tmp_path / "cache", {})
    assert build.find_cached(stored.parent) == stored
    stored.write_bytes(b"a whee1")
    assert build.find_cached(stored.parent) is None
    assert build.find_cached(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("Python", ["3.11.7", "3.12.1"], ["3.10.14", "3.13.0"]),
        ("torch", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu"], ["2.10.0", "2.14.0", "2.14.1+cpu"]),
        ("tensorflow", ["2.21.0"], ["2.20.0", "2.22.0"]),
        ("cmake", ["3.25.1", "4.0.3", "4.1"], ["3.24", "3.13.4"]),
        ("gcc", ["12.2.0", "13.1", "14.2.0", "15.1"], ["11.4.0", "9.3"]),
    ],
)
def test_versions_outside_the_table_are_refused_with_the_reason(name, good, bad):
    assert [version for version in good if support.refuse_unsupported(name, version)] == []
    for version in bad:
        reason = support.refuse_unsupported(name, version)
        assert reason and version in reason and support.SUPPORTED[name].note in reason


def test_other_archives_are_refused(tmp_path):
    garbage = tmp_path / "garbage.tar.gz"
    garbage.write_bytes(b"\x1f\x8b not really")
    with pytest.raises(HvdtrainError, match=r"readable .tar.gz"):
        build.unpack(garbage, tmp_path / "a")
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as tar:
        tar.add(__file__, "horovod-0.27.0/setup.py")
    with pytest.raises(HvdtrainError, match=r"0\.28\.1 and no other(.|\n)*horovod-0\.27\.0"):
        build.unpack(other, tmp_path / "b")


@pytest.mark.parametrize("filters", [True, False], ids=["with filters", "Python 3.11.2"])
def test_an_archive_that_escapes_its_folder_is_refused(tmp_path, monkeypatch, filters):
    if not filters:
        monkeypatch.delattr(tarfile, "data_filter")
    evil = tmp_path / "evil.tar.gz"
    with tarfile.open(evil, "w:gz") as tar:
        tar.add(__file__, "../escaped.py")
    with pytest.raises(HvdtrainError):
        build.unpack(evil, tmp_path / "target")
    assert not (tmp_path / "escaped.py").exists()


def test_a_python_without_extraction_filters_unpacks_and_refuses_links(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter")
    good, link = tmp_path / "good.tar.gz", tarfile.TarInfo("horovod-0.28.1/setup.cfg")
    with tarfile.open(good, "w:gz") as tar:
        tar.add(__file__, "horovod-0.28.1/setup.py")
    assert (build.unpack(good, tmp_path / "good") / "setup.py").is_file()
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    evil = tmp_path / "evil.tar.gz"
    with tarfile.open(evil, "w:gz") as tar:
        tar.add(__file__, "horovod-0.28.1/setup.py")
        tar.addfile(link)
    with pytest.raises(HvdtrainError, match="no plain file"):
        build.unpack(evil, tmp_path / "evil")


def test_a_failed_step_shows_the_end_of_its_log(tmp_path):
    steps = build.Steps(tmp_path / "log", lambda line: None)
    program = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(HvdtrainError, match=r"exit code 3(.|\n)*line 99") as caught:
        steps("counting", [sys.executable, "-c", program])
    assert "line 50" not in str(caught.value) and str(tmp_path / "log") in str(caught.value)


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    steps = build.Steps(tmp_path / "log", lambda line: None)
    with pytest.raises(HvdtrainError, match="exit code -9"):
        steps("hanging", [sys.executable, "-c", program], timeout_s=2)
    child = int((tmp_path / "log").read_text().splitlines()[-1])
    deadline = time.monotonic() + 10  # the kernel ends a process some time after SIGKILL
    while time.monotonic() < deadline:
        try:
            if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.02)
    raise AssertionError("it still runs")


def test_an_archive_that_the_index_made_up_is_not_run(tmp_path, monkeypatch, limit):
    """pip runs setup.py for an archive's metadata; the checksum has to come before that."""
    ran, index = tmp_path / "ran", tmp_path / "index" / "horovod"
    index.mkdir(parents=True)
    top = tmp_path / f"horovod-{build.HOROVOD_VERSION}"
    top.mkdir()
    (top / "setup.py").write_text(f"open({str(ran)!r}, 'w')\nimport setuptools\nsetuptools.setup(name='horovod')\n")
    archive = index / f"{top.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, top.name)
    (index / "index.html").write_text(f'<a href="{archive.name}">{archive.name}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", index.parent.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(HvdtrainError, match="DO NOT MATCH THE HASHES") as error:
        build.fetch_sdist(cache, build.Steps(tmp_path / "log", print))
    assert not ran.exists() and build.SDIST_SHA256 in str(error.value)
    limit("C11a", "a package index that lies: its archive's setup.py", refused=str(error.value).splitlines()[0])


def recipe(*arguments: str, python: str = sys.executable, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-m", "hvdtrain", "build-horovod", *arguments],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
    )  # fmt: skip


def test_check_says_what_is_missing_in_another_python(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = recipe("--check", python=str(tmp_path / "bare/bin/python"))
    assert done.returncode == 2
    assert "neither torch nor tensorflow is installed" in done.stderr
    assert "pip install" in done.stderr and "cloudpickle" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_names_missing_tools(tmp_path):
    done = recipe("--check", PATH=str(tmp_path))
    assert done.returncode == 2 and "apt-get install cmake" in done.stderr and "apt-get install g++" in done.stderr


def test_wrong_arguments_are_refused():
    assert recipe("--gpu", "rocm").returncode == 2
    done = recipe("--sdist", "nowhere.tar.gz")
    assert done.returncode == 2 and "--sdist must name a file" in done.stderr


# --- the Horovod that is installed here


def python(program: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
    )  # fmt: skip


def test_zero_grad_takes_set_to_none():
    done = python(
        "import torch, horovod.torch as hvd; hvd.init(); w = torch.nn.Linear(1, 1)\n"
        "o = hvd.DistributedOptimizer(torch.optim.SGD(w.parameters(), lr=.1), named_parameters=w.named_parameters())\n"
        "w(torch.ones(1, 1)).sum().backward(); o.step(); o.zero_grad(set_to_none=False)\n"
        "print(w.weight.grad.item()); o.zero_grad(); print(w.weight.grad)"
    )
    assert done.stdout.split() == ["0.0", "None"], done.stderr


def test_stock_keras_wrapper_warns_that_it_does_not_average():
    done = python(
        "import keras, horovod.keras as hvd; hvd.init(); hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))",
        KERAS_BACKEND="tensorflow",
    )
    assert "does NOT average gradients on Keras 3" in done.stderr, done.stderr


def test_extensions_carry_no_folder_of_the_build_machine():
    for framework in ("torch", "tensorflow"):
        found = python(f"import horovod.{framework} as h; print(h.__file__)").stdout.strip()
        (library,) = Path(found).parent.glob("mpi_lib*.so")
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
        parts = [part for path in paths for part in path.split(":")]
        assert parts and all(part.startswith("$ORIGIN") for part in parts), (
            dynamic
        )  # an empty part means the current folder


def test_messages_carry_no_folder_of_the_build_machine():
    found = python("import horovod.torch as h; print(h.__file__)").stdout.strip()
    (library,) = Path(found).parent.glob("mpi_lib*.so")
    text = library.read_bytes()
    assert b"horovod/common/stall_inspector.cc" in text and b"hvdtrain-horovod-" not in text


STALL = """
import threading, torch, horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:  # rank 1 never takes part: rank 0 waits until the check ends the job
    hvd.allreduce(torch.ones(1), name="lonely")
else:
    threading.Event().wait(60)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_gloo_names_a_stalled_tensor_and_ends_the_job(tmp_path):
    """Without the edit gloo-stall-check nothing is ever said (seen: 393 s of silence)."""
    from harness import run_ranks

    program = tmp_path / "stall.py"
    program.write_text(STALL)
    check = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6"}
    result = run_ranks([str(program)], 2, env=check, timeout_s=50)
    assert result.returncode != 0
    assert "missing ranks" in result.ranks_error[0].lower() and "lonely" in result.ranks_error[0], result.ranks_error[0]
    assert result.seconds < 45


@pytest.mark.ranks
def test_horovodrun_leaves_the_failed_ranks_message_readable(tmp_path):
    from harness import run_ranks

    program = tmp_path / "fail.py"
    program.write_text("import sys; sys.exit('the one clear message')")
    result = run_ranks([str(program)], 2, timeout_s=60)
    assert result.returncode == 1 and "the one clear message" in result.err
    assert "Traceback" not in result.err and "exited with non-zero status" in result.err


WAITING = """
import os, sys, time, torch, horovod.torch as hvd
hvd.init()
x = torch.ones(4)
hvd.allreduce_(x, name="first")
if hvd.rank() == 0:
    end = time.monotonic() + 1.5
    while time.monotonic() < end:  # busy, without a tensor for Horovod
        sum(range(1000))
began, cpu = time.monotonic(), time.thread_time()
hvd.allreduce_(x, name="second")
print(f"{time.monotonic() - began:.3f} {time.thread_time() - cpu:.3f}", flush=True)
hvd.shutdown()
"""


def test_what_is_built_in_is_known_without_importing_a_framework():
    """What horovodrun asks before it starts anything (edits mpi-built-at-once, gloo-built-at-once); the twin: a library
    without the class."""
    script = (
        "import sys; from horovod.common import util\n"
        "util._check_extension_lambda = lambda *args: sys.exit('it imports a framework')\n"
        "print(util.mpi_built(), util.gloo_built(), util._class_built(b'N7horovod6common14NoneControllerE'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["True", "True", "False"], ""), done


@pytest.mark.ranks
@pytest.mark.parametrize("idle_ms", ["", "100"])
def test_waiting_costs_nothing(tmp_path, idle_ms):
    """A rank that waits in synchronize() sleeps (edit torch-wait-sleeps), and ranks without a tensor ask each other for
    work as often as HOROVOD_IDLE_CYCLE_TIME says (edit idle-cycle); the twin without it: every millisecond."""
    from harness import run_ranks

    program = tmp_path / "waiting.py"
    program.write_text(WAITING)
    timeline = tmp_path / "timeline.json"
    variables = {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    variables |= {"HOROVOD_IDLE_CYCLE_TIME": idle_ms} if idle_ms else {}
    result = run_ranks([str(program)], 2, env=variables, timeout_s=60).check()
    waited_s, thread_cpu_s = map(float, result.ranks_output[1].split())
    assert waited_s > 1 and thread_cpu_s < 0.2 * waited_s, "it spins"
    cycles = timeline.read_text().count("CYCLE_START")  # of rank 0, idle for 1.5 s
    assert (5 < cycles < 100) if idle_ms else cycles > 300
