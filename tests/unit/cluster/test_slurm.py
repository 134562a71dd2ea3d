"""The batch script under a real Slurm: 2 tasks, preempted, at its time limit, cancelled, with a rank that fails."""

from __future__ import annotations

import pytest

from hvdtrain.core.errors import LauncherError
from hvdtrain.core.slurm import expand, job_hosts, tasks_per_node

# ---- lists


def test_node_lists_are_expanded() -> None:
    assert expand("gpu[03-04,07],login") == ["gpu03", "gpu04", "gpu07", "login"]
    assert expand("rack[0-1]node[9-10]") == ["rack0node9", "rack0node10", "rack1node9", "rack1node10"]
    assert expand("a.b-c") == ["a.b-c"]


@pytest.mark.parametrize("text", ["", "a;b", "a[1", "a[1-]", "a[]", "a,,b", "a b", "$(a)", "a[x]"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(LauncherError, match="Slurm writes nodes as"):
        expand(text)


def test_lists_of_millions_are_refused_before_they_are_written_out() -> None:
    for nodes in ("n[1-4000000]", "n[0-99999999999999]", "a[0-999]b[0-999]"):
        with pytest.raises(LauncherError, match="cannot have more than 100,000 nodes"):
            expand(nodes)
    with pytest.raises(LauncherError, match="4,000,000 in SLURM_TASKS_PER_NODE"):
        tasks_per_node("2(x4000000)")
    assert len(expand("n[1-100000]")) == len(tasks_per_node("2(x99999),1")) == 100_000


def test_hosts_of_a_job() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2],b", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert job_hosts(job) == "a1:2,a2:2,b:1"
    assert job_hosts({name: value for name, value in job.items() if name != "SLURM_JOB_ID"}) is None
    with pytest.raises(LauncherError, match="every node"):
        job_hosts(job | {"SLURM_TASKS_PER_NODE": "2(x2)"})
