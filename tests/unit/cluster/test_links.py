"""Which hosts do not reach each other, from what their agents answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.cluster.launch.links import LinkCheck, to_drop

ADDRESSES = {name: f"10.0.0.{number}" for number, name in enumerate(["c", "a", "b"], 1)}  # in the job's order


class Agent(SimpleNamespace):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(sent=[], ended=False, closed=False)

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


def asked(closed: str = "") -> tuple[LinkCheck, dict[str, Agent]]:
    """All have opened a port, and are to reach the others, except one that is gone."""
    agents: dict[str, Any] = {name: Agent() for name in ADDRESSES}
    look = LinkCheck(agents, ADDRESSES)
    assert look.pairs() is None
    for number, name in enumerate(name for name in agents if name != closed):
        look.take(name, {"type": "listens", "port": 1000 + number})
    if closed:
        agents[closed].closed = True
    assert look.pairs() is None
    return look, agents


def test_every_host_is_asked_for_a_port_and_then_for_the_others():
    look, agents = asked()
    assert agents["a"].sent == [
        ("listen", {"serial": look.serial, "own": "10.0.0.2"}),
        ("reach", {"serial": look.serial, "peers": {"c": ["10.0.0.1", 1000], "b": ["10.0.0.3", 1002]}}),
    ]
    for name in agents:
        assert look.pairs() is None
        look.take(name, {"type": "reached", "missing": ["c"] if name == "b" else []})
    pairs = look.pairs()
    assert pairs == [("c", "b")], "one of the two is enough: a firewall may let the other way through"
    assert "c (10.0.0.1) and b (10.0.0.3) cannot reach each other" in look.in_words(pairs)


def test_who_is_gone_is_not_waited_for_and_not_looked_for():
    look, agents = asked(closed="b")
    assert agents["a"].sent[-1][1]["peers"] == {"c": ["10.0.0.1", 1000]}
    for name in ("a", "c"):
        look.take(name, {"type": "reached", "missing": []})
    assert look.pairs() == []


def test_who_does_not_answer_is_not_waited_for_for_ever(monkeypatch):
    look, _ = asked()
    look.take("a", {"type": "reached", "missing": ["b"]})
    monkeypatch.setattr("time.monotonic", lambda: float("inf"))
    assert look.pairs() == [("a", "b")]


@pytest.mark.parametrize(
    ("pairs", "ranks", "dropped"),
    [
        ([], {"a": 1, "b": 1}, []),
        ([("a", "b")], {"a": 1, "b": 1}, ["b"]),
        ([("a", "b")], {"a": 1, "b": 2}, ["a"]),
        ([("a", "b"), ("b", "c")], {"a": 1, "b": 4, "c": 1}, ["b"]),
        ([("a", "b"), ("c", "d")], {"a": 1, "b": 1, "c": 1, "d": 1}, ["d", "b"]),
        ([("a", "b")], {"a": 1, "c": 1}, []),
    ],
)
def test_hosts_are_dropped_until_all_reach_each_other(pairs, ranks, dropped):
    assert to_drop(pairs, ranks) == dropped
