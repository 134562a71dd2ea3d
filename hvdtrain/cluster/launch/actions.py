"""What is to be done for the membership of an elastic job (`members`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.hosts.hosts import Host, Slot


@dataclass(frozen=True)
class ReachHost:
    """Reach a host; then say `host_there` or `host_gone`."""

    host: Host


@dataclass(frozen=True)
class StartWorker:
    """Start a worker.

    Attributes:
        slot: of its host's, from 0: no other living worker has it.
    """

    number: int
    host: Host
    slot: int


@dataclass(frozen=True)
class Signal:
    """Send a worker SIGKILL, or SIGTERM; when it has ended say `gone`."""

    number: int
    signal: int


@dataclass(frozen=True)
class Say:
    """Say something to a worker."""

    number: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Serve:
    """Serve the rendezvous of the next formation on a host; then say `served`."""

    serial: int
    host: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class FindCut:
    """Find out which of the members' hosts do not reach each other, and drop those; then call `looked`."""


@dataclass(frozen=True)
class Unserve:
    """End the rendezvous of the present formation: whoever still waits there must not wait any longer."""


@dataclass(frozen=True)
class Lost:
    """Tell that a worker is lost."""

    number: int
    host: str
    why: str


@dataclass(frozen=True)
class Formed:
    """Tell of a formation."""

    formation: int
    numbers: tuple[int, ...]
    slots: tuple[Slot, ...]
    after_s: float


@dataclass(frozen=True)
class Fail:
    """End the job."""

    why: str


Action = ReachHost | StartWorker | Signal | Say | Serve | FindCut | Unserve | Lost | Formed | Fail
