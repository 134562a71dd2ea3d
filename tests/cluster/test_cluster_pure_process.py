"""The parts of hvdtrain.cluster that need no processes: hosts, addresses, ssh's errors, variables, lines, failures."""

from __future__ import annotations

import json
import subprocess
import sys

from hvdtrain.cluster.hosts.hosts import Host, assign


def test_ranks_are_assigned_as_horovodrun_does():
    """Compared with Horovod's own function, in a process of its own."""
    shapes = [([2, 2], 4), ([2, 2], 3), ([3, 1, 2], 6), ([3, 1, 2], 5), ([1, 1, 1, 1], 4), ([4], 2), ([1, 4, 2], 7)]
    program = (
        "import json, sys\n"
        "from horovod.runner.common.util.hosts import HostInfo, get_host_assignments\n"
        "for slots, np in json.loads(sys.argv[1]):\n"
        "    hosts = [HostInfo(f'h{i}', count) for i, count in enumerate(slots)]\n"
        "    print(json.dumps([vars(slot) for slot in get_host_assignments(hosts, np, np)]))\n"
    )
    command = [sys.executable, "-c", program, json.dumps(shapes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for (slots, np), line in zip(shapes, done.stdout.splitlines(), strict=True):
        ours = assign([Host(f"h{index}", count) for index, count in enumerate(slots)], np)
        keys = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        assert [{"hostname": slot.host.name, **{key: getattr(slot, key) for key in keys}} for slot in ours] == [
            {"hostname": theirs["hostname"], **{key: theirs[key] for key in keys}} for theirs in json.loads(line)
        ]
