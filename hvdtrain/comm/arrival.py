"""Ranks that start at different times wait for one another, before their engine does: it may give up after seconds.

Horovod over Gloo gives the last rank 30 s (HOROVOD_GLOO_TIMEOUT_SECONDS), which is also how soon it notices a host that
is silent while it trains. So hvdtrain keeps that value, and starts Horovod when all ranks have arrived. MPI waits
silently and without a limit, even for a rank that has ended well: so a thread here enforces a time limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hvdtrain.core import variables
from hvdtrain.core.errors import EXIT_CODE, ConfigError, LauncherError, describe
from hvdtrain.core.launchers import Detected

_TIMEOUT_S = 1800.0  # ranks import, read and download before they come; torch.distributed waits as long
_FIRST_NOTE_S = 30.0
_REQUEST_S = 10.0
_TRIES = 5
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")


class Store(Protocol):
    """A key-value store that all ranks of a job can read and write."""

    def set(self, key: str, value: str) -> Any: ...
    def check(self, keys: list[str]) -> bool: ...


def timeout_s(environ: Mapping[str, str]) -> float:
    return seconds_of(environ, variables.START_TIMEOUT_S, _TIMEOUT_S)


def seconds_of(environ: Mapping[str, str], variable: str, default: float, *, never: bool = False) -> float:
    """Returns the seconds that a variable asks for, of which 0 may stand for never; pure. Raises `ConfigError` for
    no such number."""
    text = environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or (seconds == 0 and not never):
        raise ConfigError(f"{variable} must be a number of seconds{', 0 for never' * never}", repr(text))
    return seconds


def start_horovod(start: Callable[[], object], detected: Detected, environ: Mapping[str, str]) -> None:
    """Calls Horovod's `start`, over Gloo when every rank is about to; over MPI this process ends when not all come.
    Raises `ConfigError` for a time-out that is no number or an interface that this host lacks; `LauncherError` for
    ranks that did not come in time, no rendezvous, or a Horovod that cannot start."""
    seconds = timeout_s(environ)
    if detected.launcher == "horovodrun" and detected.rendezvous is not None:
        check_interface(environ, socket.gethostname(), [name for _, name in socket.if_nameindex()])
        wait_for_all(Rendezvous(detected.rendezvous), detected.rank, detected.size, seconds)
        try:
            start()
        except ValueError as error:  # Horovod's only word for whatever went wrong
            fix = "read the line of Horovod's above; hvdtrain doctor looks at networks and memory"
            raise LauncherError("Horovod cannot start on this rank", str(error), fix) from error
        return
    with watched_mpi(detected, seconds):
        start()


def check_interface(environ: Mapping[str, str], host: str, present: Collection[str]) -> None:
    """Raises `ConfigError` for an interface for Gloo that a host does not have, with those that it has; pure."""
    variable = _INTERFACES[0]
    named = environ.get(variable, "")
    if named and named not in present:
        rule, received = f"{variable} must name a network interface of {host}", f"{named}; it has {', '.join(present)}"
        raise ConfigError(rule, received, f"unset {variable}: hvdtrain launch chooses one, or --network 10.0.0.0/24")


@contextlib.contextmanager
def watched_mpi(detected: Detected, seconds: float) -> Iterator[None]:
    """Ends this process when MPI, inside, has waited so long for the others to come."""
    started = threading.Event()
    if detected.size > 1:
        asked = (detected.rank, detected.size, seconds, started)
        threading.Thread(target=_watch_mpi, args=asked, name="hvdtrain start", daemon=True).start()
    try:
        yield
    finally:
        started.set()


def _watch_mpi(rank: int, size: int, seconds: float, started: threading.Event) -> None:
    """Reports a long wait, and ends this process, whose main thread is inside of MPI, when it was too long."""
    began, note_s = time.monotonic(), _FIRST_NOTE_S
    while not started.wait(min(note_s, seconds) - (time.monotonic() - began)):
        waited = time.monotonic() - began
        if waited >= seconds:
            error = LauncherError(
                f"all {size} ranks must start within {seconds:.0f} s",
                "MPI still waits for some ranks, and does not report which",
                "read the output of ranks that ended: one may have ended before hvdtrain.init, without an error;\n"
                f"if ranks need longer before hvdtrain.init: {variables.START_TIMEOUT_S}=3600",
                code=7,
            )
            print(describe("hvdtrain", error, rank), file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)
        if waited >= note_s:
            note_s *= 2
            if rank < 2:  # should rank 0 be the one that is missing
                message = f"for {waited:.0f} s, up to {seconds:.0f} s ({variables.START_TIMEOUT_S})"
                print(f"hvdtrain: rank {rank} waits {message} for others to start MPI", file=sys.stderr, flush=True)


def wait_for_all(store: Store, rank: int, size: int, seconds: float) -> None:
    """Returns when every rank has called it; raises `LauncherError` with the ranks that did not come in time. The
    lowest rank that is there reports on the way which are missing. Rank 0 looks for the others, and they for its
    word: so one that waits asks one question at a time."""
    store.set(_here(rank), "")
    missing = list(range(size))
    note_s = _FIRST_NOTE_S
    for remaining in attempts(seconds):
        if rank == 0:
            missing = _missing(store, missing)
            if not missing:
                store.set("all", "")
                return
        elif store.check(["all"]):
            return
        if seconds - remaining >= note_s:
            note_s *= 2
            missing = _missing(store, missing)
            if not any(other not in missing for other in range(rank)):
                waited = f"for {seconds - remaining:.0f} s, up to {seconds:.0f} s ({variables.START_TIMEOUT_S})"
                print(f"hvdtrain: waiting {waited} for {names_of(missing)} to start", file=sys.stderr, flush=True)
    missing = _missing(store, missing)
    raise LauncherError(
        f"all {size} ranks must start within {seconds:.0f} s",
        f"{names_of(missing)} did not arrive, rank {rank} reports",
        "start them at the same time, on every host; what takes longer before hvdtrain.init:"
        f" {variables.START_TIMEOUT_S}=3600",
        shared=0 not in missing,
        code=7,
    )


def _here(rank: int) -> str:
    return f"here.{rank}"


def _missing(store: Store, ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([_here(rank)])]


def names_of(ranks: Sequence[int]) -> str:
    """Returns "rank 1", "ranks 1, 3"; of many the first; pure."""
    shown = ", ".join(map(str, ranks[:20])) + (f" and {len(ranks) - 20} more" if len(ranks) > 20 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def attempts(seconds: float) -> Iterator[float]:
    """Yields the seconds that remain, at once and then at growing distances; the last is not above 0."""
    deadline = time.monotonic() + seconds
    pause_s = 0.02
    while (remaining := deadline - time.monotonic()) > 0:
        yield remaining
        time.sleep(min(pause_s, max(deadline - time.monotonic(), 0.0)))  # others are asked, who can tell nobody
        pause_s = min(pause_s * 1.5, 1.0)
    yield remaining


def listen_to_ranks(detected: Detected, environ: Mapping[str, str]) -> tuple[socket.socket, tuple[str, ...]]:
    """Opens a socket of rank 0's on a free port, as narrowly as the other ranks can reach it; returns it and its
    addresses. Ranks of one host: 127.0.0.1. Else the interface that the launcher, or the user, has named for Gloo;
    all addresses where none has. Raises `OSError` if there is none to be had."""
    named = next((environ[name] for name in _INTERFACES if environ.get(name)), "")
    own = environ.get("HOROVOD_GLOO_ADDRESS") or _address_of(named)
    bound = "127.0.0.1" if detected.local_size == detected.size else own
    listener = socket.create_server((bound, 0), backlog=min(detected.size, 1024))
    interfaces = [bound] if bound else [_address_of(name) for _, name in socket.if_nameindex()]
    # no loopback: on another host it leads to another program
    return listener, tuple(address for address in interfaces if address and (bound or not address.startswith("127.")))


def _address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface ("=eth0,eth1" is NCCL's and Gloo's way to write eth0); "" if none."""
    name = interface.lstrip("=").partition(",")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


class Rendezvous:
    """The `Store` that horovodrun, and `hvdtrain launch`, serve over HTTP for Horovod's own start, at "host:port"."""

    def __init__(self, address: str, scope: str = "hvdtrain") -> None:
        self._address, self._scope = address, scope

    def set(self, key: str, value: str) -> None:
        self._ask("PUT", key, value)

    def check(self, keys: list[str]) -> bool:
        return all(self.get(key) is not None for key in keys)

    def get(self, key: str) -> str | None:
        status, body = self._ask("GET", key)
        return body.decode() if status == 200 else None

    def _ask(self, method: str, key: str, value: str | None = None) -> tuple[int, bytes]:
        """Returns the answer; a server that a thousand ranks ask at once may need another try."""
        import http.client  # on a rank only: it takes a tenth of the time of `hvdtrain launch --help`

        for left in reversed(range(_TRIES)):
            try:
                with contextlib.closing(http.client.HTTPConnection(self._address, timeout=_REQUEST_S)) as connection:
                    connection.request(method, f"/{self._scope}/{key}", value)
                    answer = connection.getresponse()
                    return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise LauncherError(
                        "every rank must reach the rendezvous of its launcher",
                        f"http://{self._address}: {error}",
                        "start the ranks again; if the launcher still ran: hvdtrain doctor -H ... looks for a firewall",
                    ) from error
            time.sleep(1.0)
        raise AssertionError("it has returned or raised")
