"""What befalls a job from outside, and what mends it again."""

from __future__ import annotations

from collections.abc import Callable

import psutil
from cluster_breakages import sh
from cluster_disks import play
from failure_job import PROGRAM, Job

AGENT = "hvdtrain.cluster.launch.agent"
WRITER = "hvdtrain.checkpoint.writer"
DISK_BYTES = 4 << 20
# classic BPF: a random number above 30 % of 2**32 is no match; what matches goes to the class that drops
LOSE_30_PERCENT = f"4,32 0 0 {0xFFFFF000 + 56},37 0 1 {int(0.3 * 2**32)},6 0 0 0,6 0 0 {2**32 - 1}"
AN_HOUR_S = 3600


def kill(*processes: psutil.Process) -> None:
    """All at once: each is stopped first, so that none sees another end."""
    for process in processes[1:]:
        process.suspend()
    for process in processes:
        process.kill()


def rank_1(job: Job) -> psutil.Process:
    return job.processes("host2", str(PROGRAM))[0]


# ---- hosts, and what joins them


def cut(job: Job) -> None:
    job.happens()
    job.c.cut("host2")


def restore(job: Job) -> None:
    job.c.restore("host2")


def power_off(job: Job) -> None:
    job.happens()
    job.c.power_off("host2")


def boot(job: Job) -> None:
    if job.c.hosts["host2"].pid is None:
        job.c.boot("host2")


def deaf_or_mute(host: str) -> Callable[[Job], None]:
    def one_way(job: Job) -> None:
        """What this host sends is lost, what it is sent arrives."""
        job.happens()
        sh(job.c, host, "tc qdisc add dev eth0 root blackhole")

    return one_way


def lose_packets(job: Job) -> None:
    """Both ways, until five updates were done: TCP waits longer and longer before it sends again."""
    job.happens()
    for host in job.c.hosts:
        sh(
            job.c,
            host,
            "tc qdisc add dev eth0 root handle 1: htb default 1 r2q 100000",
            *(f"tc class add dev eth0 parent 1: classid 1:{number} htb rate 10gbit" for number in (1, 2)),
            "tc qdisc add dev eth0 parent 1:2 blackhole",
            f"tc filter add dev eth0 parent 1: bpf bytecode '{LOSE_30_PERCENT}' flowid 1:2",
        )
    job.trained(5)
    free_links(job)


def free_links(job: Job) -> None:
    for host in job.c.hosts:
        job.c.run(host, ["tc", "qdisc", "del", "dev", "eth0", "root"])


def cut_and_restore(job: Job) -> None:
    """For as long as the launcher takes to give up."""
    cut(job)
    job.until(lambda: bool(job.attempts()))
    restore(job)


# ---- disks and clocks


def own_disk(job: Job) -> None:
    """A small one for rank 0's checkpoints."""
    (job.folder / "checkpoints").mkdir()
    job.c.tmpfs("host1", job.folder / "checkpoints", size_bytes=DISK_BYTES)


def fill(job: Job) -> None:
    job.happens()
    job.c.run("host1", ["dd", "if=/dev/zero", f"of={job.folder}/checkpoints/full", "bs=4k"])  # until no more goes in


def empty(job: Job) -> None:
    sh(job.c, "host1", f"rm {job.folder}/checkpoints/full")


def read_only(job: Job) -> None:
    """Between two saves: no file may be open for writing."""
    sh(job.c, "host1", f"until mount -o remount,ro {job.folder}/checkpoints 2>/dev/null; do sleep 0.01; done")
    job.happens()


def writable(job: Job) -> None:
    sh(job.c, "host1", f"mount -o remount,rw {job.folder}/checkpoints")


def false_disk_and_clock(job: Job) -> None:
    for host in job.c.hosts:
        job.c.tricked(host)


def slow_disk(job: Job) -> None:
    """For a save, or two: what training has memory for. The first one makes the folder, and waits for that."""
    job.trained(5)
    job.happens()
    play(job.c.folder / "host1", fsync_s=2)
    job.trained(12)
    play(job.c.folder / "host1")


def clock_jumps(job: Job) -> None:
    """An hour ahead on rank 1's host, then two hours back."""
    job.happens()
    play(job.c.folder / "host2", skew_s=AN_HOUR_S)
    job.trained(10)
    play(job.c.folder / "host2", skew_s=-AN_HOUR_S)
    job.trained(10)


def kill_writer(job: Job) -> None:
    """While it writes."""
    play(job.c.folder / "host1", fsync_s=2)
    writing = job.folder / "checkpoints"
    before = set(writing.glob("*"))
    job.until(lambda: bool(set(writing.glob("*")) - before))
    (writer,) = job.processes("host1", WRITER)
    job.happens()
    kill(writer)
    play(job.c.folder / "host1")


# ---- memory


def limit_memory(job: Job) -> None:
    """As a container has it, where the kernel ends what takes too much: 64 MiB more than now."""
    pid = next(int(line.split()[-1]) for line in _status(rank_1(job)) if line.startswith("NSpid"))
    group = "/run/memory/hvdtrain-test"
    sh(
        job.c,
        "host2",
        "mkdir -p /run/memory; mountpoint -q /run/memory || mount -t cgroup -o memory none /run/memory",
        f"mkdir -p {group}; echo {64 << 20} > {group}/memory.limit_in_bytes; echo {pid} > {group}/cgroup.procs",
    )
    (job.folder / "hog").touch()


def _status(process: psutil.Process) -> list[str]:
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as file:
        return file.readlines()


def free_memory(job: Job) -> None:
    sh(job.c, "host2", "rmdir /run/memory/hvdtrain-test; umount /run/memory")


# ---- what starts the ranks


def signal_launcher(number: int) -> Callable[[Job], None]:
    def send(job: Job) -> None:
        job.happens()
        job.running.send_signal(number)

    return send


def kill_launcher(job: Job) -> None:
    job.happens()
    job.running.kill()


def agents(job: Job, host: str) -> list[psutil.Process]:
    """The guard, and the agent, its child."""
    return [its for its in job.processes(host, AGENT) if its.name().startswith("python")][:2]


def kill_agent(job: Job) -> None:
    job.happens()
    kill(agents(job, "host2")[1])


def kill_session(job: Job) -> None:
    """Which sshd calls "root@notty", as it has no terminal."""
    job.happens()
    job.c.run("host2", ["pkill", "-KILL", "-f", "@notty"]).check()


def kill_guard(job: Job) -> None:
    job.happens()
    kill(agents(job, "host1")[0])


def kill_agent_and_guard(job: Job) -> None:
    job.happens()
    kill(*agents(job, "host2"))


# ---- elastic jobs


def said(job: Job, *texts: str) -> None:
    for text in texts:
        job.until(lambda text=text: text in job.text)


def goes_on_alone(job: Job) -> None:
    power_off(job)
    said(job, "continuing with 1 rank")
    job.trained(5)


def comes_back(job: Job) -> None:
    goes_on_alone(job)
    boot(job)
    said(job, "continuing with 2 ranks (formation 3")
    job.trained(5)


def is_replaced(job: Job) -> None:
    job.happens()
    kill(rank_1(job))
    said(job, "continuing with 1 rank", "continuing with 2 ranks (formation 3")
    job.trained(5)


def dies_while_they_meet(job: Job) -> None:
    first, second = job.processes("host2", str(job.folder))[-2:]
    job.happens()
    kill(first)
    said(job, "lost: ended by SIGKILL")
    kill(second)
    said(job, "continuing with 1 rank")
    job.trained(5)
