"""The Horovod recipe: its patches, its refusals, its cache."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import build, environment, patching, support

NAMES = (*patching.ALWAYS, *patching.BY_GPU["none"], *patching.BY_GPU["nccl"])
Files = dict[str, bytes]


def files_of(patch: patching.Patch) -> set[str]:
    return {file for file, _, _ in patch.hunks()}


def write(files: Files, folder: Path) -> Path:
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    return folder


def snapshot(source: Path) -> Files:
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def pristine(sdist) -> Files:
    """The files that are patched, as they come: the whole is 3700 files, most of them other projects'."""
    wanted = {
        f"horovod-{support.HOROVOD_VERSION}/{file}": file
        for name in NAMES
        for file in files_of(patching.Patch.read(name))
    }
    with tarfile.open(sdist) as tar:
        found = {wanted[member.name]: tar.extractfile(member) for member in tar if member.name in wanted}
        return {file: opened.read() for file, opened in found.items() if opened is not None}


@pytest.fixture(scope="module")
def before(pristine, tmp_path_factory) -> dict[str, Files]:
    """The files of each patch, as it finds them."""
    found = {}
    for gpu in ("none", "nccl"):
        source = write(pristine, tmp_path_factory.mktemp("stages"))
        for patch in patching.needed(gpu):
            there = [file for file in files_of(patch) if (source / file).exists()]  # others it makes
            found[patch.name] = {file: (source / file).read_bytes() for file in there}
            patching.apply(source, [patch])
    return found


@pytest.fixture
def source(pristine, tmp_path) -> Path:
    return write(pristine, tmp_path)


def test_cuda_patches_depend_on_the_target():
    names = {gpu: {patch.name for patch in patching.needed(gpu)} for gpu in ("none", "nccl")}
    assert "no-cuda" in names["none"] - names["nccl"]
    assert "tensorflow-late-nccl" in names["nccl"] - names["none"]
    assert "gloo-stall-check" in names["none"] & names["nccl"]


def test_a_second_application_is_refused_and_changes_nothing(source):
    patching.apply(source, patching.needed("none"))
    before = snapshot(source)
    with pytest.raises(HvdtrainError, match=r"patch '.*' must find its lines"):
        patching.apply(source, patching.needed("none"))
    assert snapshot(source) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_refuses_sources_that_differ_in_any_line_it_names(before, tmp_path, name):
    patch = patching.Patch.read(name)
    for file, first, hunk in patch.hunks():
        if not first:
            with pytest.raises(HvdtrainError, match="the file is there"):
                patching.apply(write({**before[name], file: b""}, tmp_path), [patch])
            (tmp_path / file).unlink()
            continue
        for number in range(first, first + sum(not line.startswith("+") for line in hunk)):
            lines = before[name][file].splitlines(keepends=True)
            lines[number - 1] = b"another\n"
            changed = {**before[name], file: b"".join(lines)}
            received = (
                rf"patch '{name}' must find its lines in {re.escape(file)}(.|\n)*line {number} is 'another', expected"
            )
            with pytest.raises(HvdtrainError, match=received):
                patching.apply(write(changed, tmp_path), [patch])
            assert snapshot(tmp_path) == changed
    patching.apply(write(before[name], tmp_path), [patch])  # the twin: nothing differs


HERE = environment.Environment(
    python="3.11.7", python_tag="cpython-311", machine="x86_64", cpu_flags="avx", torch="2.12.1", torch_cuda="13.0",
    torch_cxx11=True, tensorflow="2.21.0", cmake="3.25.1", gcc="12.2.0", mpi="Open MPI 4.1.4", gpu="nccl", nccl="2.29",
)  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(environment.Environment)])
def test_the_cache_key_sees_every_field(field):
    changed: dict[str, Any] = {field: "none" if field == "gpu" else "other"}
    other = dataclasses.replace(HERE, **changed)
    assert build.cache_key(other) != build.cache_key(HERE)


FOR_TENSORFLOW = dataclasses.replace(HERE, torch=None, torch_cuda=None, torch_cxx11=None)


def test_tensorflow_alone_is_compiled_with_a_cuda_whose_compiler_can_be_had(monkeypatch):
    assert (HERE.cuda, FOR_TENSORFLOW.cuda) == ("13.0", support.CUDA_FOR_TENSORFLOW)
    assert support.CUDA_FOR_TENSORFLOW in support.CUDA_WHEELS and "on CUDA 13.0" in FOR_TENSORFLOW.describe()
    key, keys = build.cache_key(FOR_TENSORFLOW), build.cache_key(HERE)
    monkeypatch.setattr(environment, "CUDA_FOR_TENSORFLOW", "13.1")
    assert build.cache_key(FOR_TENSORFLOW) != key and build.cache_key(HERE) == keys
    # the twin: without NCCL nothing is compiled with CUDA, whatever PyTorch was built with
    assert (
        dataclasses.replace(HERE, gpu="none").cuda is None
        and dataclasses.replace(FOR_TENSORFLOW, gpu="none").cuda is None
    )


@pytest.mark.parametrize(
    ("torch", "packages", "cuda"),
    [
        ({"version": "2.12.1", "cuda": "13.0"}, ["tensorflow-cpu"], "13.0"),
        ({}, ["tensorflow", "nvidia-nccl-cu12"], support.CUDA_FOR_TENSORFLOW),
        ({}, ["tensorflow"], None),  # without the extra and-cuda
        ({}, ["tensorflow-cpu", "nvidia-nccl-cu12"], None),
        ({"version": "2.12.1+cpu", "cuda": None}, ["tensorflow", "nvidia-nccl-cu12"], None),
    ],
)
def test_nccl_is_built_in_where_a_framework_for_gpus_is(monkeypatch, torch, packages, cuda):
    def version(*names: str) -> str | None:
        return next(("1.0" for name in names if name in packages), None)

    monkeypatch.setattr(environment, "distribution_version", version)
    assert environment.cuda_here(torch) == cuda
    refused = environment._gpu_problems("nccl", torch)
    assert bool(refused) == (bool(torch) and cuda is None), (
        "asked for, TensorFlow alone gets it: CMake finds NCCL or fails"
    )
    assert environment._gpu_problems("auto", torch) == []


def test_the_cache_key_sees_source_and_patches(tmp_path, monkeypatch):
    key = build.cache_key(HERE)
    assert build.cache_key(HERE) == key
    assert build.cache_key(HERE, sdist_sha256="0" * 64) != key
    assert build.cache_key(HERE, cuda="wheels") != key
    monkeypatch.setattr(patching, "FOLDER", shutil.copytree(patching.FOLDER, tmp_path / "patches"))
    patch = patching.FOLDER / "cxx17.patch"
    patch.write_text("Better said.\n" + patch.read_text())
    assert build.cache_key(HERE) == key, "a reason alone compiles nothing again"
    patch.write_text(patch.read_text().replace("CXX_STANDARD 17", "CXX_STANDARD 20"))
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
    ("name", "tested", "too_old", "newer"),
    [
        ("Python", ["3.10.13", "3.13.0", "3.14.0"], "3.9.18", "3.15.0"),
        ("torch", ["2.11.0", "2.14.1+cu130", "2.15.1+cpu"], "2.10.0", "2.16.0+cpu"),
        ("tensorflow", ["2.20.0", "2.21.0"], "2.19.1", "3.0.0"),
        ("cmake", ["3.25.1", "4.0.3", "4.1"], "3.24", "5.0"),
        ("gcc", ["12.2.0", "13.1", "14.2.0", "15.1"], "11.4.0", "16.1"),
    ],
)
def test_old_versions_are_refused_and_new_ones_noted(name, tested, too_old, newer):
    for version in tested:
        assert support.refuse_unsupported(name, version) is support.note_untested(name, version) is None
    reason = support.refuse_unsupported(name, too_old)
    assert reason and too_old in reason and support.SUPPORTED[name].why in reason
    assert support.refuse_unsupported(name, newer) is None
    note = support.note_untested(name, newer)
    assert note and newer in note and support.SUPPORTED[name].newest in note


def test_other_archives_are_refused(tmp_path):
    garbage = tmp_path / "garbage.tar.gz"
    garbage.write_bytes(b"\x1f\x8b not really")
    with pytest.raises(HvdtrainError, match=r"readable .tar.gz"):
        build.unpack(garbage, tmp_path / "a")
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as tar:
        tar.add(__file__, "horovod-0.27.0/setup.py")
    with pytest.raises(HvdtrainError, match=r"0\.28\.1: the recipe patches no other version(.|\n)*horovod-0\.27\.0"):
        build.unpack(other, tmp_path / "b")
