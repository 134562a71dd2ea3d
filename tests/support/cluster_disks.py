"""The disks of the hosts that `cluster_hosts` makes: a copy of this machine's /etc each, home folders, keys."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

DISK_BYTES = 32 << 20  # more than anybody's /etc and the logs take
SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
MaxStartups 200
AcceptEnv LANG LC_*
"""
# loaded before all other libraries: what it shows is in a file of two numbers, which may change meanwhile
TRICKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static const volatile long none[2], *tricks = none;
__attribute__((constructor)) static void begin(void) {
  int file = open(TRICKS_FILE, O_RDONLY);
  void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) tricks = found;
  if (file >= 0) close(file);
}
int fsync(int file) {
  int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
  if (tricks[1]) sleep(tricks[1]);
  return real(file);
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, t);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += tricks[0];
  return result;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec; t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""


def folder_for_disks(count: int) -> Path:
    """Make a folder with room for the disks of `count` hosts, in memory if it can be: they have many small files."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > count * DISK_BYTES
    return Path(tempfile.mkdtemp(prefix="hvdtrain-cluster-", dir=memory if roomy else None))


def furnish(folder: Path, hosts: Mapping[str, Sequence[tuple[str, str]]], shm_bytes: Sequence[int | None]) -> None:
    """Write every host's disk under folder/NAME: it knows the others' host keys, and lets their root in.

    Args:
        folder: of the cluster.
        hosts: name to its interfaces: (name, address with prefix length).
        shm_bytes: size of each host's /dev/shm, None for the default.
    """
    folder.chmod(0o711)
    (folder / "home").mkdir(mode=0o700)
    user_key = new_key(folder / "id_ed25519")
    known = ""
    for (name, interfaces), size_bytes in zip(hosts.items(), shm_bytes, strict=True):
        (folder / name).mkdir(mode=0o711)
        subprocess.run(["cp", "-a", "/etc", folder / name / "etc"], check=True)
        host_key = _new_host_key(folder / name / "etc" / "ssh")
        addresses = [address.split("/")[0] for _, address in interfaces]
        known += f"{','.join([name, *addresses])} {' '.join(host_key.split()[:2])}\n"
        settings = {"shm_bytes": size_bytes, "interfaces": interfaces, "sshd": sshd_command(folder / name)}
        (folder / name / "settings.json").write_text(json.dumps(settings))
    table = "".join(f"{interfaces[0][1].split('/')[0]} {name}\n" for name, interfaces in hosts.items())
    for name in hosts:
        _write_etc(folder / name / "etc", name, table, folder / "home")
        _write_home(folder / name / "home", folder / "id_ed25519", user_key, known)


def new_key(path: Path) -> str:
    """Make a key without a passphrase; returns its public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "throwaway", "-f", path], check=True)
    return Path(f"{path}.pub").read_text()


def sshd_command(folder: Path) -> list[str]:
    """The command that starts the sshd of the host with this disk; it goes to the background."""
    return [program("sshd"), "-f", "/etc/ssh/sshd_config", "-E", str(folder / "sshd.log")]


def program(name: str) -> str:
    """The path of a program, "" if there is none; sshd is not on everybody's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin") or ""


def build_tricks(folder: Path) -> Path:
    """Compile a library that, loaded before all others, shows the clock and the disk that `play` sets."""
    library, source = folder / "tricks.so", folder / "tricks.c"
    source.write_text(TRICKS)
    library.unlink(missing_ok=True)  # running programs may have the last one loaded
    where = f'-DTRICKS_FILE="{folder}/tricks"'
    subprocess.run(["cc", "-shared", "-fPIC", where, "-o", library, source, "-ldl"], check=True)
    return library


def play(folder: Path, *, skew_s: int = 0, fsync_s: int = 0) -> None:
    """Set the clock that much ahead, and have every fsync take so long; for running programs, too."""
    with (folder / "tricks").open("r+b" if (folder / "tricks").exists() else "wb") as file:
        file.write(struct.pack("ll", skew_s, fsync_s))


def _new_host_key(folder: Path) -> str:
    for of_this_machine in folder.glob("ssh_host_*"):
        of_this_machine.unlink()
    return new_key(folder / "ssh_host_ed25519_key")


def _write_etc(etc: Path, name: str, table: str, home: Path) -> None:
    # agents find the package where these tests do, also where they run in a checkout that is not installed
    path = os.environ.get("PYTHONPATH")
    _replace(etc / "ssh" / "sshd_config", SSHD_CONFIG + (f"SetEnv PYTHONPATH={path}\n" if path else ""))
    _replace(etc / "hosts", f"127.0.0.1 localhost\n::1 localhost\n{table}")
    _replace(etc / "hostname", f"{name}\n")
    # no name server: an unknown name is an error at once
    _replace(etc / "nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    users = [line for line in (etc / "passwd").read_text().splitlines() if not line.startswith("root:")]
    _replace(etc / "passwd", "\n".join([f"root:x:0:0:root:{home}:/bin/bash", *users, ""]))


def _write_home(home: Path, key: Path, public_key: str, known_hosts: str) -> None:
    home.mkdir(mode=0o700)
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700)
    (ssh / "known_hosts").write_text(known_hosts)
    (ssh / "authorized_keys").write_text(public_key)
    for half in (key, Path(f"{key}.pub")):
        shutil.copy2(half, ssh / half.name)


def _replace(path: Path, text: str) -> None:
    """Write a new file: what was there may be a link to elsewhere."""
    path.unlink(missing_ok=True)
    path.write_text(text)
