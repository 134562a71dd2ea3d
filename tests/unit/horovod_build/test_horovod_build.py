"""The Horovod recipe: its edits, its refusals, its cache, and the Horovod that the set-up installed with it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import build, edits, environment, support


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
