"""The Horovod recipe: its patches, its refusals, its cache."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import build, environment, patching, support


def test_cuda_patches_depend_on_the_target():
    names = {gpu: {patch.name for patch in patching.needed(gpu)} for gpu in ("none", "nccl")}
    assert "no-cuda" in names["none"] - names["nccl"]
    assert "tensorflow-late-nccl" in names["nccl"] - names["none"]
    assert "gloo-stall-check" in names["none"] & names["nccl"]


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


def test_the_cache_key_sees_compiler_and_patches(tmp_path, monkeypatch):
    key = build.cache_key(HERE)
    assert build.cache_key(HERE) == key
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
    other = tmp_path / "horovod-0.28.1.tar.gz"
    with pytest.raises(HvdtrainError, match="No such file"):
        build.unpack(other, tmp_path)
    other.write_bytes(b"another")
    with pytest.raises(HvdtrainError, match=r"the source must be PyPI's horovod-0\.28\.1"):
        build.unpack(other, tmp_path)
