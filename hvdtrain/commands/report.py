"""What `hvdtrain doctor` prints for people: the hosts as a table, what was measured, then what was found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hvdtrain.cluster.doctor import findings
from hvdtrain.cluster.doctor.checks import GIB, Facts, bytes_text, known
from hvdtrain.cluster.doctor.network import Links
from hvdtrain.core import stats

if TYPE_CHECKING:
    from hvdtrain.cluster.doctor.run import Examined

_GIGABIT = 1e9 / 8


def text(found: Examined) -> str:
    """Return the whole report."""
    parts = [_hosts(found)] if found.cluster.facts else []
    measured = [*_network(found.links)] if found.links is not None else []
    if found.live is not None and found.live.seconds is not None:
        measured.append(f"live all-reduce: {found.live.in_words()}")
    if measured:
        parts.append("\n".join(measured))
    if found.findings:
        parts.append(findings.text(found.findings))
    parts.append(_verdict(found))
    return "\n\n".join(parts)


def _hosts(found: Examined) -> str:
    """The hosts, one a column each; where there are many, only what is the same would repeat."""
    rows = [["", *found.cluster.facts]]
    columns = [_column(found, host) for host in found.cluster.facts]
    rows += [[name, *(column.get(name, "") for column in columns)] for name in columns[0]]
    rows = [row for row in rows if any(row[1:])]
    if len(columns) <= 6:
        return stats.table(rows)
    # many hosts: a line each
    return stats.table([list(line) for line in zip(*rows, strict=True)])


def _column(found: Examined, host: str) -> dict[str, str]:
    facts = found.cluster.facts[host]
    packages: Facts = known(facts, "packages") or {}
    several = found.links is not None and len(found.links.chosen) > 1
    chosen = found.links.chosen.get(host) if found.links is not None and several else None
    memory, shared = known(facts, "memory") or {}, known(facts, "shared_memory")
    tools = known(facts, "tools") or {}
    return {
        "ranks": str(found.cluster.ranks[host]),
        "address": f"{chosen.address} {chosen.interface}" if chosen else "",
        "Python": (known(facts, "python") or {}).get("version", "?"),
        "torch": packages.get("torch", "-"),
        "tensorflow": packages.get("tensorflow", packages.get("tensorflow-cpu", "-")),
        "Keras": packages.get("keras", "-"),
        "Horovod": packages.get("horovod", "-"),
        "  for torch": _built(facts, "torch"),
        "  for tensorflow": _built(facts, "tensorflow"),
        "MPI": ((known(facts, "mpi") or {}).get("version") or ["-"])[0].rpartition(" ")[2],
        "GPUs": _gpus(facts),
        "NCCL": next((packages[name] for name in packages if name.startswith("nvidia-nccl")), "-"),
        "cores": _cores(facts),
        "memory free": f"{memory['MemAvailable'] / GIB:.0f} GiB" if "MemAvailable" in memory else "",
        "/dev/shm free": bytes_text(shared["free_bytes"]) if shared else "",
        **{name: tools.get(name) or "" for name in ("c++", "cmake", "nvcc")},
    }  # fmt: skip


def _built(facts: Facts, framework: str) -> str:
    extension: Any = ((known(facts, "horovod") or {}).get("extensions") or {}).get(framework)
    if extension is None:
        return "-"
    names = {"nccl": "NCCL", "mpi": "MPI", "gloo": "Gloo"}
    return " ".join(name for key, name in names.items() if extension[key])


def _gpus(facts: Facts) -> str:
    gpus = known(facts, "gpus")
    if not gpus or not gpus["devices"]:
        return str(known(facts, "gpu_count") or "-")
    kinds = Counter(device["name"].removeprefix("NVIDIA ") for device in gpus["devices"])
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f" (driver {gpus['driver']})"


def _cores(facts: Facts) -> str:
    cores = known(facts, "cores")
    if cores is None:
        return "?"
    return f"{cores['quota']:g} of {cores['usable']}" if cores["quota"] else str(cores["usable"])


def _network(links: Links) -> list[str]:
    lines = []
    answers = [reply["seconds"] for replies in links.reach.values() for reply in replies.values() if "seconds" in reply]
    pairs = sum(len(replies) for replies in links.reach.values())
    if answers:
        lines.append(
            f"network: {len(answers)} of {pairs} ways between hosts open; a byte there and back in"
            f" {min(answers) * 1e3:.2f} to {max(answers) * 1e3:.2f} ms"
        )
    if rates := sorted(links.rates().values()):
        lines.append(
            f"network: {rates[0] / _GIGABIT:.2f} to {rates[-1] / _GIGABIT:.2f} Gbit/s, one TCP stream from a host to"
            " the next"
        )
    if links.clocks:
        ahead = [ahead for ahead, _ in links.clocks.values()]
        least = max(error for _, error in links.clocks.values())
        lines.append(f"clocks: {min(ahead):+.3f} to {max(ahead):+.3f} s from this machine's (known to {least:.3f} s)")
    return lines


def _verdict(found: Examined) -> str:
    hosts, ranks = len(found.question.taking_part), len(found.question.slots)
    what = f"{hosts} host(s), {ranks} rank(s), examined in {found.seconds:.1f} s"
    if not found.findings:
        return f"nothing to say: {what}"
    counts = Counter(finding.severity for finding in found.findings)
    return ", ".join(f"{counts[name]} {name}(s)" for name in findings.EXIT_CODES if counts[name]) + f": {what}"
