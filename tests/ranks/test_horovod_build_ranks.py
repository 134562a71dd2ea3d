"""The Horovod recipe: its patches as git takes them, its refusals, and the Horovod that set-up installed with it."""

from __future__ import annotations

import importlib.util
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
from harness import REPOSITORY, run_ranks

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import build, patching, steps, support


def snapshot(source: Path) -> dict[str, bytes]:
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("gpu", [pytest.param("none", marks=pytest.mark.thorough), "nccl"])
def test_git_takes_the_patches_in_their_order_and_makes_the_same_of_them(sdist, tmp_path, gpu):
    """The twin: on what is patched already git refuses each."""
    ours, gits = build.unpack(sdist, tmp_path / "ours"), build.unpack(sdist, tmp_path / "git")
    pristine = snapshot(ours)
    patching.apply(ours, patching.needed(gpu))
    # in a repository git apply leaves out, and says nothing of, what is not below the folder that it runs in
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": str(tmp_path)}

    def git_apply(name: str, *flags: str) -> subprocess.CompletedProcess:
        command = ["git", "apply", *flags, str(patching.FOLDER / f"{name}.patch")]
        return subprocess.run(command, cwd=gits, env=env, capture_output=True, text=True)

    for patch in patching.needed(gpu):
        git_apply(patch.name).check_returncode()
        assert "patch does not apply" in git_apply(patch.name, "--check").stderr, patch.name
    assert snapshot(ours) == snapshot(gits)
    with pytest.raises(HvdtrainError, match=r"patch '.*' must find its lines"):
        patching.apply(ours, patching.needed(gpu))
    assert {file for file, data in snapshot(ours).items() if data != pristine.get(file)} == {
        file for patch in patching.needed(gpu) for file, _, _ in patch.hunks()
    }


@pytest.mark.parametrize(
    "cause",
    [
        "horovod/a.cc:3:5: error: no",
        "k.cu(7): error: no",
        "g++: fatal error: Killed",
        "b.cc: undefined reference to `x'",
    ],
)
def test_a_failed_step_shows_its_first_error_and_not_the_traceback_after_it(tmp_path, cause):
    run = steps.Commands(tmp_path / "log", lambda line: None)
    program = f"print('quiet'); print({cause!r})\nfor i in range(100): print('  line', i)\nraise SystemExit(3)"
    with pytest.raises(HvdtrainError, match="exit code 3") as caught:
        run("compiling", [sys.executable, "-c", program])
    said = str(caught.value)
    assert cause in said and "line 28" in said and "line 29" not in said and "quiet" not in said, said


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    run = steps.Commands(tmp_path / "log", lambda line: None)
    with pytest.raises(HvdtrainError, match="exit code -9"):
        run("hanging", [sys.executable, "-c", program], timeout_s=2)
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
    top = tmp_path / f"horovod-{support.HOROVOD_VERSION}"
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
        build.fetch_sdist(cache, steps.Commands(tmp_path / "log", print))
    assert not ran.exists() and support.SDIST_SHA256 in str(error.value)
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
    assert done.returncode == 2 and "nowhere.tar.gz: No such file" in done.stderr


# --- the Horovod that is installed here


def test_zero_grad_takes_set_to_none():
    program = (
        "import torch, horovod.torch as hvd; hvd.init(); w = torch.nn.Linear(1, 1)\n"
        "o = hvd.DistributedOptimizer(torch.optim.SGD(w.parameters(), lr=.1), named_parameters=w.named_parameters())\n"
        "w(torch.ones(1, 1)).sum().backward(); o.step(); o.zero_grad(set_to_none=False)\n"
        "print(w.weight.grad.item()); o.zero_grad(); print(w.weight.grad)"
    )
    assert run_ranks(["-c", program], 1).check().out.split() == ["0.0", "None"]


def extension(framework: str) -> Path:
    """The installed extension's library; found without importing a framework."""
    spec = importlib.util.find_spec("horovod")
    assert spec is not None and spec.submodule_search_locations is not None
    (package,) = spec.submodule_search_locations
    (library,) = (Path(package) / framework).glob("mpi_lib*.so")
    return library


def test_extensions_carry_no_folder_of_the_build_machine():
    for framework in ("torch", "tensorflow"):
        command = ["readelf", "-d", str(extension(framework))]
        dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
        parts = [part for path in paths for part in path.split(":")]
        assert parts and all(part.startswith("$ORIGIN") for part in parts), (
            dynamic
        )  # an empty part means the current folder


def symbols(library: Path | str, which: str) -> set[str]:
    command = ["nm", "-D", which, str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [line.split()[-2:] for line in listed.splitlines()]
    return {name.partition("@")[0] for kind, name in found if kind not in "wv"}


def libraries(file: Path) -> dict[str, Path]:
    """What the loader finds for an extension, by name; every one is there."""
    listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
    assert "not found" not in listed
    return {Path(place).name: Path(place) for place in re.findall(r"^\s*(?:\S+ => )?(/\S+)", listed, re.MULTILINE)}


def test_tensorflows_extension_needs_nothing_that_tensorflow_cpu_lacks():
    """With NCCL too: it is looked up when it is called. The twins: without TensorFlow's library symbols are missing;
    PyTorch's extension is linked with NCCL."""
    file = extension("tensorflow")
    needed = symbols(file, "--undefined-only")
    loaded = libraries(file)
    there = {name: symbols(path, "--defined-only") for name, path in loaded.items()}
    assert needed - set().union(*there.values()) == set()
    without = set().union(*(names for library, names in there.items() if "tensorflow" not in library))
    assert len(needed - without) > 50
    assert not [name for name in (*needed, *loaded) if name.startswith(("nccl", "libnccl", "cuda", "libcuda", "cu"))]
    if b"NCCLAllreduce" in extension("torch").read_bytes():
        assert b"NCCLAllreduce" in file.read_bytes(), "TensorFlow's extension has NCCL where PyTorch's has"
        assert "ncclAllReduce" in symbols(extension("torch"), "--undefined-only")


def test_messages_carry_no_folder_of_the_build_machine():
    text = extension("torch").read_bytes()
    assert b"horovod/common/stall_inspector.cc" in text and b"hvdtrain-horovod-" not in text


STALL = """
import threading, torch, horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:  # rank 1 never takes part: rank 0 waits until the check ends the job
    hvd.allreduce(torch.ones(1), name="lonely")
else:
    threading.Event().wait(60)
"""


@pytest.mark.slow
def test_gloo_names_a_stalled_tensor_and_ends_the_job(tmp_path):
    """Without the patch gloo-stall-check nothing is ever said (seen: 393 s of silence)."""
    program = tmp_path / "stall.py"
    program.write_text(STALL)
    check = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    result = run_ranks([str(program)], 2, env=check, timeout_s=50)
    assert result.returncode != 0
    assert "missing ranks" in result.ranks_error[0].lower() and "lonely" in result.ranks_error[0], result.ranks_error[0]
    assert result.seconds < 45


def test_horovodrun_leaves_the_failed_ranks_message_readable(tmp_path):
    program = tmp_path / "fail.py"
    program.write_text("import sys; sys.exit('the one clear message')")
    result = run_ranks([str(program)], 2, launcher="horovodrun", timeout_s=60)
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
    """What horovodrun asks before it starts anything (patch built-at-once); the twin: a library
    without the class."""
    script = (
        "import sys; from horovod.common import util\n"
        "util._check_extension_lambda = lambda *args: sys.exit('it imports a framework')\n"
        "print(util.mpi_built(), util.gloo_built(), util._class_built(b'N7horovod6common14NoneControllerE'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["True", "True", "False"], ""), done


@pytest.mark.thorough
@pytest.mark.parametrize("idle_ms", ["", "100"])
def test_waiting_costs_nothing(tmp_path, idle_ms):
    """A rank that waits in synchronize() sleeps (patch torch-wait-sleeps), and ranks without a tensor ask each other
    for work as often as HOROVOD_IDLE_CYCLE_TIME says (patch idle-cycle); the twin without it: every millisecond."""
    program = tmp_path / "waiting.py"
    program.write_text(WAITING)
    timeline = tmp_path / "timeline.json"
    variables = {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    variables |= {"HOROVOD_IDLE_CYCLE_TIME": idle_ms} if idle_ms else {}
    result = run_ranks([str(program)], 2, launcher="horovodrun", env=variables, timeout_s=60).check()
    waited_s, thread_cpu_s = map(float, result.ranks_output[1].split())
    assert waited_s > 1 and thread_cpu_s < 0.2 * waited_s, "it spins"
    cycles = timeline.read_text().count("CYCLE_START")  # of rank 0, idle for 1.5 s
    assert (5 < cycles < 100) if idle_ms else cycles > 300
