"""Three hosts, two of which no longer reach each other; the launcher's own, the first, reaches both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import Cluster, cluster
from failure_job import Job, judged
from failure_makers import said

THREE = "host1:1,host2:1,host3:1"
SOON = ("-x", "HOROVOD_GLOO_TIMEOUT_SECONDS=5", "--lost-after", "4", "--grace", "2")
NO_LINK = "host2 (10.77.0.12) and host3 (10.77.0.13) cannot reach each other through the ranks' network"


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c
        c.end_all()


@pytest.mark.slow
def test_a_job_names_two_hosts_that_do_not_reach_each_other(hosts: Cluster, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, hosts=THREE, np=3)
    job.start(*SOON)
    job.trained(3)
    job.happens()
    hosts.cut_between("host2", "host3")
    code, _, left = job.ended(120)
    (attempt,) = job.attempts()
    assert (code, left) == (255, []) and attempt["failure"]["host"] == "host3", job.text
    assert NO_LINK in job.text[job.text.rindex("hvdtrain launch: host host3 failed first") :], job.text


def parted(hosts: Cluster, folder: Path, *, pace_s: float) -> Job:
    """An elastic job that goes on without host3."""
    job = Job(hosts, folder, hosts=THREE, np=3, pace_s=pace_s)
    job.start(*SOON, "--min-np", "1")
    job.trained(3)
    job.happens()
    hosts.cut_between("host2", "host3")
    said(job, f"host host3 is lost: {NO_LINK}", "continuing with 2 ranks (formation 2; host1: 1, host2: 1)")
    job.trained(3)
    return job


def ends_well(job: Job, formations: list[list[int]]) -> None:
    (job.folder / "finish").touch()
    code, _, left = job.ended(120)
    assert (code, left) == (0, []), job.text
    assert judged(job.folder, 3) == (0, []), job.text
    assert [its["workers"] for its in job.attempts()[0]["formations"]] == formations, job.text


@pytest.mark.slow
@pytest.mark.thorough
def test_an_elastic_job_goes_on_without_one_of_them(hosts: Cluster, tmp_path: Path) -> None:
    ends_well(parted(hosts, tmp_path, pace_s=0.2), [[0, 1]])


@pytest.mark.slow
@pytest.mark.thorough
def test_an_elastic_job_takes_a_host_back_once_it_reaches_the_others(hosts: Cluster, tmp_path: Path) -> None:
    """While it does not, no formation is made with it."""
    job = parted(hosts, tmp_path, pace_s=1.0)
    before = hosts.sshd_log("host3").count("Accepted")
    job.until(lambda: hosts.sshd_log("host3").count("Accepted") >= before + 2)  # it has been tried, and is again
    hosts.join_again("host2", "host3")
    said(job, "continuing with 3 ranks (formation 3; host1: 1, host2: 1, host3: 1)")
    job.trained(3)
    ends_well(job, [[0, 1], [0, 1, 3]])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("flags", [(), ("--min-np", "1")], ids=str)
def test_hosts_that_never_reached_each_other_are_named(hosts: Cluster, tmp_path: Path, flags: tuple[str, ...]) -> None:
    job = Job(hosts, tmp_path, hosts=THREE, np=3)
    hosts.cut_between("host2", "host3")
    job.start(*SOON, *flags)
    code, _, left = job.ended(120)
    assert (code, left) == (255, []), job.text
    assert NO_LINK in job.text[job.text.rindex("hvdtrain launch: host host3 failed first") :], job.text
