"""Ranks that write one checkpoint together: each its stripes of the files whose bytes all ranks have.

The files are those that rank 0 alone would write. Ranks of one host take part: those that reach a socket which rank 0
makes in the directory, so that they are known to see it. Their processes (`hvdtrain.checkpoint.writer`) talk through
that, and one that dies is noticed by its end. Without such processes (synchronous saves) any rank takes part that sees
the directory which rank 0 has just made, whatever its host.

    rank 0's process -> another's   {"number": ..., "directory": name, or null where there is nothing to write}
    another's -> rank 0's           {"number": ..., "files": {name: sealed}} or {"number": ..., "failure": [...]}
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.checkpoint.checkpoint_files import Sealed, joined, seal
from hvdtrain.checkpoint.checkpoint_folder import LINK, Folder, Written, fill, name_of, put
from hvdtrain.checkpoint.parts import Part
from hvdtrain.checkpoint.staging import ALL, Images, Share, StateFile
from hvdtrain.core.errors import CheckpointError
from hvdtrain.world.world import World

_LONGEST_MESSAGE = 1 << 17
LEAST_BYTES = 32 << 20  # less is written sooner than agreed on
STRIPE_BYTES = 4 << 20
_MOST_STRIPES = 128  # of a rank in a file: their checksums go into one message
_PATIENCE_S = 10.0  # with connections that are there already
_RULE = "a checkpoint must be written whole"
Write = Callable[[StateFile], object]


@dataclass(frozen=True)
class Group:
    """Ranks whose processes are linked.

    Attributes:
        id: of the links; "": there are none.
        ranks: who write, rank 0 first.
    """

    id: str
    ranks: tuple[int, ...]


# -- in the processes that write ------------------------------------------------------------------------------------
class Link:
    """A process's sockets to the others': rank 0's has one to each, theirs have one to rank 0's.

    Args:
        ranks: at the other ends.
        sockets: in that order.
    """

    def __init__(self, ranks: Sequence[int], sockets: Sequence[socket.socket]) -> None:
        self._others = dict(zip(ranks, sockets, strict=True))
        self._early: dict[str, Any] | None = None

    def lead(
        self, number: int, folder: Folder, written: Written, name: str, files: Mapping[str, tuple[Write, Share]]
    ) -> None:
        """Writes rank 0's share, and makes the checkpoint when the others' are there.

        Raises:
            CheckpointError: a rank could not write its share.
        """
        told = False
        try:
            with folder.begun(files) as temporary:
                told = True
                self._tell(number, temporary.name)
                try:
                    mine = {part: put(temporary / part, *how) for part, how in files.items()}
                finally:
                    answers = self._answers(number)  # whatever happened here: they are on their way
                theirs = [_files_of(rank, answer) for rank, answer in answers.items()]
                folder.complete(temporary, written, name, together(mine, theirs))
        finally:
            if not told:
                self._tell(number, None)

    def follow(self, number: int, directory: Path, files: Mapping[str, tuple[Write, Share]]) -> None:
        """Writes another rank's share."""
        name = self._told(number)
        if name is None:
            return
        try:
            sealed = {part: put(directory / name / part, *how) for part, how in files.items()}
            answer: dict[str, Any] = {"files": sealed}
        except Exception as error:  # rank 0 is to know, whatever it is
            answer = {"failure": _said(error)}
        self._tell(number, **answer)

    def _tell(self, number: int, directory: str | None = None, **said: Any) -> None:
        message = json.dumps({"number": number, "directory": directory, **said}).encode()
        for other in self._others.values():
            with contextlib.suppress(OSError):  # it is gone, which is noticed when it is to answer
                other.send(message)

    def _answers(self, number: int) -> dict[int, dict[str, Any]]:
        found = {}
        for rank, other in self._others.items():
            answer = _received(other)
            while answer is not None and answer["number"] < number:  # of a checkpoint that failed here
                answer = _received(other)
            found[rank] = answer or {"failure": [_RULE, "the process that wrote its part has ended", ""]}
        return found

    def _told(self, number: int) -> str | None:
        """Returns the directory of that checkpoint; None: nothing is written of it."""
        (main,) = self._others.values()
        while True:
            found, self._early = self._early or _received(main), None
            if found is None:
                return None
            if found["number"] > number:  # rank 0's process was not given this one
                self._early = found
                return None
            if found["number"] == number:
                directory: str | None = found["directory"]
                return directory
            self._tell(found["number"], failure=[_RULE, "its part was not handed over", ""])


def _received(link: socket.socket) -> dict[str, Any] | None:
    try:
        data = link.recv(_LONGEST_MESSAGE)
    except OSError:
        return None
    found: dict[str, Any] | None = json.loads(data) if data else None
    return found


def _said(error: Exception) -> list[str]:
    if isinstance(error, OSError):
        return [_RULE, error.strerror or str(error), "make room (earlier checkpoints are untouched)"]
    return [_RULE, f"{type(error).__name__}: {error}", ""]


def _files_of(rank: int, answer: Mapping[str, Any]) -> dict[str, Sealed]:
    if answer.get("failure"):
        rule, received, remedy = answer["failure"]
        raise CheckpointError(rule, f"rank {rank}: {received}", remedy)
    files: dict[str, Sealed] = answer["files"]
    return files


def together(mine: Mapping[str, Sealed], theirs: Sequence[Mapping[str, Sealed]]) -> dict[str, Sealed]:
    """Returns what is known of each file, of all ranks' shares."""
    return {part: joined([sealed, *(its[part] for its in theirs if part in its)]) for part, sealed in mine.items()}


# -- in the ranks ---------------------------------------------------------------------------------------------------
class Notes(Protocol):
    """Is told how a checkpoint went, by any thread."""

    def sealed(self, path: Path) -> Path: ...
    def failed(self) -> None: ...


class Processes(Protocol):
    """What a `hvdtrain.checkpoint.writer.Writer` does here.

    Attributes:
        links: of the process that lives.
    """

    links: set[str]
    lock: Any  # of who saves

    def start(self) -> None: ...
    def link(self, group: Group, ranks: Sequence[int], sockets: Sequence[socket.socket]) -> None: ...
    def images(self) -> Images: ...
    def submit(
        self,
        images: Images,
        files: Mapping[str, StateFile],
        folder: Folder,
        written: Written,
        link: tuple[str, int],
        *,
        leads: bool,
        noted: Notes | None = None,
    ) -> Path: ...


class Together:
    """How the ranks of one checkpointer write together; the same on every rank.

    Args:
        directory: as this rank calls it.

    Attributes:
        off: they do not: it did not go, or would not pay.
    """

    def __init__(self, folder: Folder, directory: Path, *, off: bool = False) -> None:
        self.folder, self.directory = folder, directory
        self.off = off
        self.group = Group("", (0,))
        self.number = 0
        self._met: object = None

    def stripe_bytes(self, state: Mapping[str, Part], ranks: int) -> int | None:
        """Returns how the files are cut; None: there is too little to share."""
        total = sum(part.replicated_bytes() for part in state.values())
        if total < LEAST_BYTES:
            return None
        return STRIPE_BYTES * -(-total // (ranks * _MOST_STRIPES * STRIPE_BYTES))

    def shares(self, state: Mapping[str, Part], index: int, size: int, stripe_bytes: int) -> dict[str, Share]:
        """Returns this rank's share of each file that it writes to."""
        common = Share(index, size, stripe_bytes)
        found = {name: common if part.replicated_bytes() else ALL for name, part in state.items()}
        return {name: share for name, share in found.items() if share is common or index == 0}

    def give_up(self, world: World, why: str) -> None:
        """From here on rank 0 writes alone."""
        self.off = True
        if world.is_main and why:
            print(f"hvdtrain: rank 0 writes the checkpoints alone: {why}", file=sys.stderr, flush=True)

    def link(self, world: World, writer: Processes) -> bool:
        """Has the ranks' processes linked; collective. Returns whether there are others than rank 0's."""
        with ExitStack() as held:
            listener, name = _listening(self.folder.directory, world.size, held) if world.is_main else (None, None)
            name = world.broadcast(name)
            mine = None if world.is_main or name is None else _connected(self.directory, name, world.rank, held)
            reached = [rank for rank, there in enumerate(world.gather(mine is not None)) if there]
            group = Group("", (0,))
            if listener is not None:
                sockets = _accepted(listener, reached, held)
                group = Group(name or "", (0, *sockets))
                writer.link(group, list(sockets), list(sockets.values()))
            self.group = world.broadcast(group if world.is_main else None) or group
            if mine is not None and world.rank in self.group.ranks:
                writer.link(self.group, [0], [mine])
        self.number = 0
        return len(self.group.ranks) > 1

    def write_later(
        self,
        world: World,
        state: Mapping[str, Part],
        written: Written,
        stripe_bytes: int,
        writer: Processes,
        noted: Notes | None = None,
    ) -> Path | None:
        """Hands one to the ranks' processes; collective. None: rank 0 is to write it alone."""
        if self._met is not world.comm:  # ranks that have met anew may be others
            self._met, self.group = world.comm, Group("", (0,))
        with writer.lock:
            try:
                writer.start()
                linked: bool | None = world.rank not in self.group.ranks or self.group.id in writer.links
            except OSError:
                linked = None
            every = world.gather(linked)
            if None in every or not (all(every) or self.link(world, writer)):
                self.give_up(world, "a rank can start no process for it" if None in every else "")
                return None
            ranks, member = self.group.ranks, world.rank in self.group.ranks
            images, files = (writer.images(), {}) if member else (None, {})
            why, refused = "", False
            try:
                if images is not None:
                    shares = self.shares(state, ranks.index(world.rank), len(ranks), stripe_bytes)
                    for name, share in shares.items():
                        files[name] = images.file(name, share)
                        fill(files[name], state[name].write)
            except OSError as error:
                why = f"rank {world.rank}: {error}"
            except Exception:  # which rank 0 will find, and raise, alone
                refused = True
            digests = {name: file.digest for name, file in files.items() if file.share.size > 1}
            reports = [report for rank, report in enumerate(world.gather((why, refused, digests))) if rank in ranks]
            if any(refused for _, refused, _ in reports):
                return None
            why = next((why for why, *_ in reports if why), "") or differing([digests for *_, digests in reports])
            if why:
                self.give_up(world, why)
                return None
            self.number += 1
            link = (self.group.id, self.number)
            path = world.on_main(writer.submit, images, files, self.folder, written, link, leads=True, noted=noted)
            if images is not None and not world.is_main:
                here = replace(self.folder, directory=self.directory.resolve())
                writer.submit(images, files, here, written, link, leads=False)
            return path

    def write_here(self, world: World, state: Mapping[str, Part], written: Written, stripe_bytes: int) -> Path | None:
        """Writes one while training waits; collective. None: rank 0 is to write it alone."""
        with ExitStack() as held:
            name = world.on_main(self._begin, held, state)
            here = (self.folder.directory if world.is_main else self.directory) / name
            ranks = [rank for rank, sees in enumerate(world.gather(here.is_dir())) if sees]
            report: dict[str, Any] = {"refused": False}
            if world.rank in ranks and len(ranks) > 1:
                shares = self.shares(state, ranks.index(world.rank), len(ranks), stripe_bytes)
                report = _written_here(here, state, shares)
            reports = [report for rank, report in enumerate(world.gather(report)) if rank in ranks]
            why = "" if len(ranks) > 1 else "no other rank sees the directory"
            refused = any(its["refused"] for its in reports)  # which rank 0 will find, and raise, alone
            if not (why or refused or any(its["failure"] for its in reports)):
                why = differing([report["digests"] for report in reports])
            if refused or why:
                world.on_main(self.folder.abandon, here)
                if why:
                    self.give_up(world, why)
                return None
            return world.on_main(self._complete, here, written, dict(zip(ranks, reports, strict=True)))

    def _begin(self, held: ExitStack, state: Mapping[str, Part]) -> str:
        return held.enter_context(self.folder.begun(state)).name

    def _complete(self, temporary: Path, written: Written, reports: Mapping[int, dict[str, Any]]) -> Path:
        first, *others = [_files_of(rank, report) for rank, report in reports.items()]
        return self.folder.complete(temporary, written, name_of(written.progress), together(first, others))


def _written_here(folder: Path, state: Mapping[str, Part], shares: Mapping[str, Share]) -> dict[str, Any]:
    files: dict[str, Sealed] = {}
    digests: dict[str, str] = {}
    failure, refused = None, False
    for name, share in shares.items():
        try:
            with StateFile.on_disk(folder / name, share, made=True) as file:
                fill(file, state[name].write)
                files[name] = seal(file)
                digests |= {name: file.digest} if share.size > 1 else {}
        except OSError as error:
            failure = failure or _said(error)
        except Exception:
            refused = True
    return {"failure": failure, "refused": refused, "files": files, "digests": digests}


def differing(digests: Sequence[Mapping[str, str]]) -> str:
    """Returns what differs between ranks' images of the same state; "": nothing."""
    every = dict.fromkeys(name for its in digests for name in its)
    names = [name for name in every if len({its.get(name) for its in digests}) > 1]
    return f"{', '.join(names)} would not have the same bytes on all ranks" if names else ""


def _listening(directory: Path, backlog: int, held: ExitStack) -> tuple[socket.socket | None, str | None]:
    """Makes a socket in the directory; None: it takes none."""
    name = f".{LINK}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        with _short(directory) as short:
            listener.bind(f"{short}/{name}")
        held.callback((directory / name).unlink, missing_ok=True)
        listener.listen(backlog)
    except OSError:
        return None, None
    return listener, name


@contextlib.contextmanager
def _short(directory: Path) -> Any:
    """Gives a name of the directory that a socket's address has room for."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _connected(directory: Path, name: str, rank: int, held: ExitStack) -> socket.socket | None:
    """Returns a connection to rank 0's socket; None: it is not in what this rank calls that directory."""
    link = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        with _short(directory) as short:
            link.connect(f"{short}/{name}")
        link.send(json.dumps(rank).encode())
    except OSError:
        return None
    return link


def _accepted(listener: socket.socket, ranks: Sequence[int], held: ExitStack) -> dict[int, socket.socket]:
    """Returns the connections that ranks have made, by rank."""
    listener.settimeout(_PATIENCE_S)
    found = {}
    with contextlib.suppress(OSError, ValueError):  # who is not found takes no part
        for _ in ranks:
            link = held.enter_context(listener.accept()[0])
            link.settimeout(_PATIENCE_S)
            found[int(json.loads(link.recv(_LONGEST_MESSAGE)))] = link
    return dict(sorted(found.items()))
