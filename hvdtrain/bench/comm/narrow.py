"""Links of a rate: each rank in a network namespace of its own, on a switch that leads nowhere else.

The whole benchmark runs in namespaces of its own (`unshare`): when its last process ends, in whatever way, all of it is
gone. The rate is tc's token bucket, both ways of each rank's cable. What launchers start through ssh is started by a
script in its place, which enters the namespace of that address.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, LauncherError

NEEDED = {"unshare": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
# what comes of `ssh [options] address command...`
SHIM = """#!/bin/sh
address=
while :; do
  case $1 in
    -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;
    -*) shift ;;
    *) [ -n "$address" ] && break; address=$1; shift ;;
  esac
done
exec {ip} netns exec "$address" sh -c "$*"
"""
BURST_BYTES = 256 << 10  # above the 64 KiB that the kernel hands a cable at once


def enter() -> None:
    """Starts this very command again in namespaces of its own, unless it runs there.

    Raises:
        ConfigError: not root, or a program is missing.
    """
    if os.environ.get(variables.BENCH_NAMESPACE):
        return
    missing = [package for name, package in NEEDED.items() if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        received = "not root" if os.geteuid() != 0 else f"no {' '.join(missing)}"
        raise ConfigError("links of a rate are network namespaces, which need root", received, "leave out --rate")
    os.environ[variables.BENCH_NAMESPACE] = "1"
    command = [sys.executable, "-m", "hvdtrain", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--net", "--mount", "--", *command])


class NarrowNetwork:
    """A namespace a rank, each with one cable to the switch.

    Args:
        ranks: how many.
        rate: of each cable, both ways, as tc writes it ("200mbit").
        folder: for the script that stands for ssh.

    Raises:
        LauncherError: this kernel does not offer one of its parts.
    """

    def __init__(self, ranks: int, rate: str, folder: Path) -> None:
        slower(rate, 1)
        self.addresses = [f"10.77.1.{rank + 1}" for rank in range(ranks)]
        self.rate, self.folder = rate, folder
        (folder / "ssh").write_text(SHIM.format(ip=shutil.which("ip")))
        (folder / "ssh").chmod(0o755)
        Path("/run/netns").mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")  # in this mount namespace alone
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "link", "set", "switch", "up")
        for rank, address in enumerate(self.addresses):
            _run("ip", "netns", "add", address)
            _run("ip", "link", "add", f"rank{rank}", "type", "veth", "peer", "name", "eth0", "netns", address)
            _run("ip", "link", "set", f"rank{rank}", "master", "switch", "up")
            _run("ip", "-n", address, "address", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run("ip", "-n", address, "link", "set", interface, "up")
            self.limit(rank, rate, "add")

    def limit(self, rank: int, rate: str, action: str = "change") -> None:
        """Gives a rank's cable a rate, both ways."""
        bucket = ["root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "400ms"]
        _run("tc", "qdisc", action, "dev", f"rank{rank}", *bucket)
        _run("tc", "-n", self.addresses[rank], "qdisc", action, "dev", "eth0", *bucket)

    def remove(self) -> None:
        """Takes the namespaces away, for another number of ranks."""
        for rank, address in enumerate(self.addresses):
            _run("ip", "link", "delete", f"rank{rank}")
            _run("ip", "netns", "delete", address)
        _run("ip", "link", "delete", "switch")
        _run("umount", "/run/netns")

    def launched(self, launcher: str, command: Sequence[str]) -> list[str]:
        """The command that starts a rank in each namespace, from within the first."""
        path = f"PATH={self.folder}:{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        count = str(len(self.addresses))
        hosts = ",".join(f"{address}:1" for address in self.addresses)
        starts = {
            "mpirun": [
                "mpirun", "--allow-run-as-root", "-np", count, "-H", hosts, "--bind-to", "none",
                "--mca", "plm_rsh_agent", str(self.folder / "ssh"), "--mca", "oob_tcp_if_include", "eth0",
                "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0", "--mca", "pml", "ob1",
                "--mca", "mpi_yield_when_idle", "1",  # the ranks share cores, which mpirun does not see
            ],
            "horovodrun": ["horovodrun", "--gloo", "-np", count, "-H", hosts, "--network-interfaces", "eth0"],
        }  # fmt: skip
        return ["ip", "netns", "exec", self.addresses[0], "env", path, *starts[launcher], *command]


def slower(rate: str, factor: int) -> str:
    """A rate of tc's, divided.

    Raises:
        ConfigError: not a number above 0 and a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit)", rate.lower())
    if not found or not float(found[1]):
        raise ConfigError("--rate is a number and kbit, mbit or gbit", rate, "--rate 200mbit")
    return f"{float(found[1]) / factor:g}{found[2]}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LauncherError(
            "links of a rate need network namespaces, a bridge and tc's token bucket of this kernel",
            f"{' '.join(command)}: {done.stderr.strip()}",
            "leave out --rate: bytes of each link are counted without",
        )
