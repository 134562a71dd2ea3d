"""A rank of `hvdtrain verify`: trains the toy in one framework, compares all ranks' numbers, prints the findings.

    python -m hvdtrain.cluster.doctor.verify_rank torch|keras LIMIT_S [EXPECTED_SIZE]

Rank 0 prints the findings as a line of JSON. Exit code 1: a check failed. After LIMIT_S seconds the rank ends itself
with exit code 124, because it waits in vain.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import hvdtrain
from hvdtrain.cluster.doctor import verify_toy as toy
from hvdtrain.core.launchers import Detected
from hvdtrain.horovod_build import prove_rank
from hvdtrain.record import stats
from hvdtrain.world import startup
from hvdtrain.world.world import World

PROGRAM = "hvdtrain.cluster.doctor.verify_rank"
MARK = "HVDTRAIN-VERIFY "
FAILED = 1


def main() -> int:
    expected_size = int(sys.argv[3]) if len(sys.argv) > 3 else None

    def report(found: dict[str, Any]) -> None:
        print(MARK + json.dumps(found), flush=True)

    return 0 if train(sys.argv[1], float(sys.argv[2]), report, expected_size) else FAILED


def train(
    framework: str, limit_s: float, report: Callable[[dict[str, Any]], None], expected_size: int | None = None
) -> bool:
    """Trains as one rank; `report` gets what was found on rank 0. Returns True if all checks hold; collective."""
    prove_rank.end_after(limit_s)
    checks: list[toy.ToyCheck] = []

    def work(detected: Detected) -> None:
        needed = _modules(framework, detected)
        startup.find_modules(needed)
        startup.share_cores(detected)
        startup.import_modules(needed)
        with hvdtrain.init(framework) as world:  # type: ignore[arg-type]
            started = time.perf_counter()
            ranks = world.gather(toy.TRAIN[framework](card(world)))
            checks.extend(toy.checks(ranks, expected_size))
            if world.is_main:
                report({
                    "framework": framework,
                    "versions": ranks[0].versions | stats.versions("hvdtrain", "horovod"),
                    "launcher": world.launcher,
                    "engine": world.engine,
                    "ranks": [its.card for its in ranks],
                    "checks": [asdict(check) for check in checks],
                    "proof": ranks[0].proof,
                    "ok": all(check.ok for check in checks),
                    "training_seconds": round(time.perf_counter() - started, 3),
                })  # fmt: skip
            world.barrier()  # a launcher ends all ranks with the first that fails: none before rank 0 has spoken

    startup.run_program(PROGRAM, work)
    return all(check.ok for check in checks)


def card(world: World) -> dict[str, Any]:
    """Returns this rank's identity. A GPU is an index and CUDA_VISIBLE_DEVICES, which may differ from rank to rank."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return {
        "rank": world.rank, "size": world.size, "local_rank": world.local_rank, "local_size": world.local_size,
        "host": socket.gethostname(), "pid": os.getpid(), "devices": [f"{index} of {seen}" for index in world.devices],
    }  # fmt: skip


def _modules(framework: str, detected: Detected) -> dict[str, str]:
    if framework == "torch":
        return startup.torch_modules("auto", detected, torchvision=False)
    if not os.environ.get("KERAS_BACKEND"):
        os.environ["KERAS_BACKEND"] = "tensorflow" if importlib.util.find_spec("tensorflow") else "torch"
    return startup.keras_modules(os.environ["KERAS_BACKEND"], detected)


if __name__ == "__main__":
    sys.exit(main())
