"""What the launcher of an elastic job makes of what agents say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.cluster.launch.elastic import ElasticRunning


@pytest.mark.parametrize(
    ("now", "counts"), [(["10.0.0.2", 4000], True), ([], False), (["10.0.0.1", 4000], False)], ids=str
)
def test_a_host_that_is_cut_off_from_a_rendezvous_that_is_gone_is_not_lost(now: list[object], counts: bool) -> None:
    """It tells so when the host of the rendezvous has lost power, as late as that host is missed, or later."""
    running: Any = ElasticRunning.__new__(ElasticRunning)
    running._peer, running._cut, running._cut_s, running._deadline_s = now, {}, float("inf"), None
    host = SimpleNamespace(host=SimpleNamespace(name="host1"))
    running._take(host, {"type": "cut", "for_s": 15.2, "peer": ["10.0.0.2", 4000]})
    assert running._cut == ({"host1": "for 15 s"} if counts else {})


@pytest.mark.parametrize(("gone", "left"), [("host2", []), ("host3", ["10.0.0.2", 4000])])
def test_the_rendezvous_is_gone_with_its_host(gone: str, left: list[object]) -> None:
    running: Any = ElasticRunning.__new__(ElasticRunning)
    running._peer, running._cut, running._deadline_s, running._agent_of = ["10.0.0.2", 4000], {}, 0.0, {}
    running._served_by = SimpleNamespace(host=SimpleNamespace(name="host2"))
    running._members = SimpleNamespace(workers={}, host_gone=lambda *_, **__: [])
    running._host_gone(gone, "off")
    assert running._peer == left
