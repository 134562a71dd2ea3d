"""The doctor's last question: do ranks on these hosts really find each other and add up the same numbers?"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.cluster.doctor.findings import ClusterFacts, Finding, known
from hvdtrain.cluster.hosts.hosts import Host
from hvdtrain.cluster.launch import environment, launcher
from hvdtrain.cluster.launch.job import Job, Timeouts
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import prove_rank

LIMIT_S = 40.0  # importing a framework from a cold disk or a busy file server takes most of it
_LINES = 12


@dataclass
class Live:
    """The result of the all-reduce."""

    framework: str
    size: int  # ranks that took part: one on each host, or two and more on a single one
    seconds: float | None = None  # of the quickest all-reduce of `bytes`; None: it failed
    bytes: int = 0
    device: str = ""  # "cpu" or "cuda"
    failed: str = ""  # why it failed, with the last lines of the first rank that did; "" if it did not
    host: str | None = None  # where it failed, as far as known

    def in_words(self) -> str:
        """Returns the figures as a line."""
        assert self.seconds is not None
        # every rank sends and receives 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009)
        moved = 2 * (self.size - 1) / self.size * self.bytes
        return (
            f"{self.size} ranks, {self.bytes >> 20} MiB on {self.device} by Horovod for {self.framework}: sums right,"
            f" {self.seconds * 1e3:.0f} ms ({moved / self.seconds / 1e9:.2f} GB/s a rank)"
        )


def all_reduce(job: Job, cluster: ClusterFacts) -> Live | None:
    """Returns how an all-reduce over the hosts went; None where no framework is on all of them with Horovod."""
    common = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
    for facts in cluster.facts.values():
        extensions, packages = (known(facts, "horovod") or {}).get("extensions") or {}, known(facts, "packages") or {}
        common = {name: its for name, its in common.items() if name in extensions and set(its) & set(packages)}
    if not common:
        return None
    framework = next(iter(common))
    hosts = _places(job, cluster)
    live = Live(framework, sum(host.slots for host in hosts))
    # told by name: the module that this Python has may be at another path there
    argv = [job.python, "-m", "hvdtrain.horovod_build.prove_rank", framework, f"{LIMIT_S:g}"]
    env = environment.passed(os.environ)
    job = dataclasses.replace(job, argv=argv, hosts=hosts, np=live.size, env=env, timeouts=Timeouts())
    try:
        result, failed = launcher.result_of(job, prove_rank.MARK)
    except HvdtrainError as error:
        live.failed = str(error)
        return live
    if failed is not None:
        live.failed = "\n".join([failed.in_words(LIMIT_S), *failed.lines[-_LINES:]])
        live.host = failed.host
    elif result is None:
        live.failed = "rank 0 ended without a result"
    else:
        live.seconds, live.bytes, live.device = result["seconds"], result["bytes"], result["device"]
    return live


def checked(live: Live | None) -> Iterator[Finding]:
    """Yields a finding if the all-reduce failed; pure."""
    if live is not None and live.failed:
        yield Finding(
            "all-reduce-failed", "error", (live.host,) if live.host else (),
            f"an all-reduce over {live.size} ranks by Horovod for {live.framework} failed: {live.failed}",
            "a job on these hosts would fail, or hang, in the same way",
            "the lines above show where; hvdtrain verify -H ... tests each framework separately",
        )  # fmt: skip


def _places(job: Job, cluster: ClusterFacts) -> list[Host]:
    """Returns the hosts with a rank each; a single one with a rank for each GPU, and two at least."""
    hosts = [host for host in job.hosts if host.name in cluster.facts]
    if len(hosts) > 1:
        return [Host(host.name, 1) for host in hosts]
    name = hosts[0].name
    return [Host(name, max(2, min(cluster.ranks[name], known(cluster.facts[name], "gpu_count") or 0)))]
