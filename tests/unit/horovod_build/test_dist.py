"""Ready wheels: their names, what they ask pip for, and the workflow that makes them."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import itertools
import zipfile

import pytest
import yaml
from harness import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version
from test_horovod_build import HERE
from tiny_wheels import tiny_wheel

from hvdtrain.horovod_build import dist, support


@pytest.mark.parametrize(
    ("frameworks", "local"),
    [
        (("2.12.1", None, "2.21.0", None), "torch2.12cpu.tf2.21"),
        (("2.12.1+cu130", "13.0", "2.21.0", "mpirun (Open MPI) 4.1.4"), "torch2.12cu130.tf2.21.openmpi"),
        (("2.13.0+cpu", None, None, "HYDRA build details:"), "torch2.13cpu.mpi"),
        ((None, None, "2.21.0", None), "tf2.21"),
        ((None, "13.0", "2.21.0", None), "tf2.21cu130"),
    ],
)
def test_the_version_names_what_the_wheel_is_for(frameworks, local):
    version = Version(dist.version_for(*frameworks))  # refuses what PEP 440 does not take
    assert (version.public, version.local) == (support.HOROVOD_VERSION, local)


def wants(**changed: object) -> dict[str, Requirement]:
    lines = dist.requirements(dataclasses.replace(HERE, **changed))
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def test_pip_is_told_which_frameworks_fit():
    wanted = wants()
    fits = wanted["torch"].specifier.contains
    assert fits("2.12.0") and fits("2.12.1+cu130") and not fits("2.11.0") and not fits("2.13.0")
    assert wanted["torch"].marker is None and "nvidia-nccl-cu13" in wanted
    for name in ("tensorflow", "tensorflow-cpu"):  # either may be there: pip can ask for none of the two
        marker = wanted[name].marker
        assert marker and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": name})
        assert wanted[name].specifier.contains("2.21.1") and not wanted[name].specifier.contains("2.22.0")
    # the twins
    assert "nvidia-nccl-cu13" not in wants(gpu="none") and "nvidia-nccl-cu13" not in wants(nccl="of the system")
    assert set(wants(torch=None, gpu="none")) == {"tensorflow", "tensorflow-cpu"}
    assert set(wants(tensorflow=None, gpu="none")) == {"torch"}


def test_pip_is_told_of_the_nccl_that_tensorflow_alone_brings():
    alone = wants(torch=None, torch_cuda=None)
    assert (
        set(alone) == {"nvidia-nccl-cu12", "tensorflow", "tensorflow-cpu"} and alone["nvidia-nccl-cu12"].marker is None
    )


def test_a_renamed_wheel_has_the_same_files_under_its_own_name(tmp_path):
    (tmp_path / "out").mkdir()
    before = tiny_wheel(tmp_path)
    after = dist.rename(before, tmp_path / "out", "0.28.1+torch2.12cpu", ["torch==2.12.*"])
    name, version, _, tags = parse_wheel_filename(after.name)
    assert (name, str(version), {str(tag) for tag in tags}) == (dist.NAME, "0.28.1+torch2.12cpu", {"py3-none-any"})
    info = "hvdtrain_horovod-0.28.1+torch2.12cpu.dist-info"
    with zipfile.ZipFile(before) as old, zipfile.ZipFile(after) as new:
        assert {name.replace(info, "horovod-0.28.1.dist-info") for name in new.namelist()} == set(old.namelist())
        assert new.read("horovod/__init__.py") == old.read("horovod/__init__.py")
        assert new.getinfo("horovod/run.sh").external_attr == old.getinfo("horovod/run.sh").external_attr
        rows = list(csv.reader(new.read(f"{info}/RECORD").decode().splitlines()))
        assert {row[0] for row in rows} == set(new.namelist())
        for file, digest, size in rows[:-1]:
            data = new.read(file)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert int(size) == len(data)
        lines = new.read(f"{info}/METADATA").decode().split("\n\n")[0].splitlines()
    asked = [line for line in lines if line.startswith(("Name", "Version", "Requires-Dist", "Provides-Extra"))]
    assert asked == [
        "Name: hvdtrain-horovod", "Version: 0.28.1+torch2.12cpu", "Requires-Dist: cloudpickle",
        "Requires-Dist: torch==2.12.*",
    ]  # fmt: skip


# --- the release


def combinations() -> tuple[list[dict[str, str]], dict]:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "wheels.yml").read_text())
    job = workflow["jobs"]["wheels"]
    matrix = job["strategy"]["matrix"]
    axes = {name: values for name, values in matrix.items() if name not in ("include", "exclude")}
    all_of = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    kept = [one for one in all_of if not any(one.items() >= out.items() for out in matrix.get("exclude", []))]
    return kept + matrix.get("include", []), job  # each of include adds a combination: no other has its torch and gpu


def test_the_release_builds_what_the_recipe_supports():
    """Every Python and every release of PyTorch within support.py, for CPUs and for that release's CUDA."""
    found, job = combinations()

    def minors(name: str) -> list[str]:
        (major, first), (_, last) = (
            support.parse(getattr(support.SUPPORTED[name], end)) for end in ("oldest", "newest")
        )
        return [f"{major}.{minor}" for minor in range(first, last + 1)]

    def minor(torch: str) -> str:
        return ".".join(torch.split(".")[:2])

    cudas = {f"cu{version.replace('.', '')}" for version in support.CUDA_WHEELS}
    assert {one["gpu"] for one in found} == {"cpu", *cudas}
    builds = [(one["python"], minor(one["torch"]), "cpu" if one["gpu"] == "cpu" else "cuda") for one in found]
    assert sorted(builds) == sorted(itertools.product(minors("Python"), minors("torch"), ("cpu", "cuda")))
    for one in found:
        assert support.refuse_unsupported("torch", one["torch"]) is support.note_untested("torch", one["torch"]) is None
    tensorflow = job["env"]["TENSORFLOW"]
    assert (
        support.refuse_unsupported("tensorflow", tensorflow) is support.note_untested("tensorflow", tensorflow) is None
    )
