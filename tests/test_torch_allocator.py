"""Freed memory is kept: the second time the same tensors cost no page faults; without it, they do."""

from __future__ import annotations

from harness import run_ranks

PROGRAM = """
import resource, sys, torch
from hvdtrain.torch._allocator import keep_freed_memory

def steps():
    for _ in range(10):
        tensors = [torch.zeros(3_000_000) for _ in range(6)]
        del tensors

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str, **env: str) -> tuple[str, int]:
    result = run_ranks(["-c", PROGRAM, word], 1, launcher="none", env=env, timeout_s=60).check()
    kept, count = result.out.split()
    return kept, int(count)


def test_freed_memory_is_kept() -> None:
    kept, count = faults("keep")
    assert kept == "True" and count < 1000
    kept, count = faults("leave")  # the twin
    assert kept == "False" and count > 10_000


def test_what_the_user_has_set_stays() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
