"""Which address and interface each host talks through: chosen by address, because names differ from host to host.

Horovod's launcher wants one interface name that all hosts share (upstream issues 1724, 2568, 2831); Gloo and NCCL take
a name on each host. So the address is found first, then the name that it has there.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from hvdtrain.core.errors import ConfigError

Interfaces = Mapping[str, Sequence[IPv4Interface]]
_FIX = "name the network: --network 10.0.0.0/24 (or one address in it); hvdtrain doctor -H ... shows what each host has"
_NO_IPV4 = "give it one: ip address add 10.0.0.2/24 dev eth0; ip link set eth0 up (ranks do not connect over IPv6)"


@dataclass(frozen=True)
class Chosen:
    """The interface, address and network that one host uses."""

    interface: str
    address: str
    network: str  # "10.0.0.0/24"


def interfaces(found: Iterable[Mapping[str, Any]]) -> dict[str, list[IPv4Interface]]:
    """Returns the IPv4 addresses and networks of the interfaces that are up, as `probe.interfaces` lists them."""
    usable: dict[str, list[IPv4Interface]] = {}
    for its in found:
        if its["up"]:
            usable.setdefault(its["name"], []).append(IPv4Interface(f"{its['address']}/{its['prefix']}"))
    return usable


def source_towards(address: str) -> str | None:
    """Returns this machine's address on the route to `address`; None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def reached(hosts: Mapping[str, str | None], local: Collection[str]) -> dict[str, str]:
    """Returns the address at which each host was reached; for this machine (`local`), its own towards the others."""
    found = {name: address for name, address in hosts.items() if address and name not in local}
    own = source_towards(next(iter(found.values()))) if found else None
    return found | (dict.fromkeys(local, own) if own else {})


def choose(
    hosts: Mapping[str, Interfaces],
    network: str | None = None,
    reached: Mapping[str, str] | None = None,
    *,
    more: bool = False,
) -> dict[str, Chosen]:
    """Returns what each host shall talk through; pure.

    One host alone uses its loopback. Several use the network that is asked for; or else the addresses they are reached
    by (the names the user gave are a choice of network, also where routers are between), or a network all have.

    Args:
        hosts: every host's interfaces.
        network: "10.0.0.0/24", or an address in the network.
        reached: the address of each host that the connection to it ended at, as far as known.
        more: others may join: then a host alone uses its loopback only if it has nothing else.

    Raises:
        ConfigError: no such addresses, or two hosts with the same one.
    """
    if network is not None:
        return _in_asked(hosts, network)
    usable = {name: dict(_usable(its)) for name, its in hosts.items()}
    if len(hosts) == 1 and not (more and all(usable.values())):
        return {name: _loopback(name, its) for name, its in hosts.items()}
    known = {name: IPv4Address(address) for name, address in (reached or {}).items()}
    known = {name: address for name, address in known.items() if address in usable.get(name, {})}
    networks = [dict.fromkeys(its.network for _, its in all_.values()) for all_ in usable.values()]
    common = [net for net in networks[0] if all(net in others for others in networks)]
    shared = [net for net in common if _distinct(_within(usable, net))]
    shared.sort(key=lambda net: -sum(address in net for address in known.values()))
    picked: Mapping[str, IPv4Address] = known
    if shared and all(address in shared[0] for address in known.values()):
        picked = _within(usable, shared[0]) | known
    if len(picked) == len(hosts) and _distinct(picked):
        return {name: _chosen(*usable[name][address]) for name, address in picked.items()}
    raise _refused("the hosts need a network that all of them have", hosts)


def joined(name: str, its: Interfaces, network: str, reached: str | None) -> Chosen:
    """Returns the address of a host that joins others in `network`, or else the one that it was reached by; pure."""
    usable = dict(_usable(its))
    inside = [ip for ip in usable if ip in IPv4Network(network)]
    known = [ip for ip in usable if str(ip) == reached]
    if not inside and not known:
        raise _refused(f"a host that joins needs an address in {network}", {name: its})
    return _chosen(*usable[([ip for ip in known if ip in inside] or inside or known)[0]])


def _in_asked(hosts: Mapping[str, Interfaces], network: str) -> dict[str, Chosen]:
    try:
        asked = IPv4Network(network, strict=False)
    except ValueError as error:
        raise ConfigError("--network must be an IPv4 network or address", str(error), "--network 10.0.0.0/24") from None
    everything = {
        name: {its.ip: (own, its) for own, list_ in all_.items() for its in list_} for name, all_ in hosts.items()
    }
    if asked.prefixlen == 32:  # one address: the network of the interface that has it
        owners = [its.network for all_ in everything.values() for ip, (_, its) in all_.items() if ip in asked]
        if not owners:
            raise _refused(f"--network {network} must be an address of one of the hosts", hosts)
        asked = owners[0]
    found = {name: [ip for ip in all_ if ip in asked] for name, all_ in everything.items()}
    without = [name for name, its in found.items() if not its]
    if without:
        raise _refused(f"every host needs an address in {asked}", hosts, without)
    chosen = {name: its[0] for name, its in found.items()}
    if not _distinct(chosen):
        raise _refused(f"every host needs an address of its own in {asked}", hosts)
    return {name: _chosen(*everything[name][ip]) for name, ip in chosen.items()}


def _chosen(interface: str, address: IPv4Interface) -> Chosen:
    return Chosen(interface, str(address.ip), str(address.network))


def _loopback(name: str, its: Interfaces) -> Chosen:
    for interface, addresses in its.items():
        for address in addresses:
            if address.ip.is_loopback:
                return _chosen(interface, address)
    raise ConfigError("a host needs a loopback interface that is up", _listed({name: its}), "ip link set lo up")


def _usable(its: Interfaces) -> Iterator[tuple[IPv4Address, tuple[str, IPv4Interface]]]:
    for name, addresses in its.items():
        for address in addresses:
            if not address.ip.is_loopback and not address.ip.is_link_local:
                yield address.ip, (name, address)


_Usable = Mapping[str, Mapping[IPv4Address, tuple[str, IPv4Interface]]]


def _within(usable: _Usable, network: IPv4Network) -> dict[str, IPv4Address]:
    return {name: next(ip for ip, (_, its) in all_.items() if its.network == network) for name, all_ in usable.items()}


def _distinct(addresses: Mapping[str, IPv4Address]) -> bool:
    """Bridges of containers and virtual machines have the same address everywhere: no network between the hosts."""
    return len(set(addresses.values())) == len(addresses)


def _refused(rule: str, hosts: Mapping[str, Interfaces], without: Sequence[str] = ()) -> ConfigError:
    """Returns the error; if a host has no IPv4 address at all, another network is no remedy."""
    bare = [name for name, its in hosts.items() if not any(_usable(its))]
    received = f"not {', '.join(bare or without)}\n{_listed(hosts)}" if bare or without else _listed(hosts)
    if bare:
        return ConfigError("every host needs an IPv4 address", received, _NO_IPV4)
    return ConfigError(rule, received, _FIX)


def _listed(hosts: Mapping[str, Interfaces]) -> str:
    lines = []
    for name, interfaces_ in hosts.items():
        addresses = ", ".join(f"{own} {ip}" for own, its in interfaces_.items() for ip in its)
        lines.append(f"{name}: {addresses or 'no IPv4 address on an interface that is up'}")
    return "\n".join(lines)
