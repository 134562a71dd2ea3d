"""What ranks compare of a record is the same in every process."""

from __future__ import annotations

import subprocess
import sys

from harness import clean_environment

CODE = """
from hvdtrain.world.same_data import glance
print(list(glance([{"one", "two", "three"}, {"key": {"x", "y"}}, {name: 1 for name in {"a", "b", "c"}}])))
"""


def test_a_glance_at_a_record_does_not_depend_on_the_hash_seed() -> None:
    said = set()
    for seed in "123":
        env = clean_environment() | {"PYTHONHASHSEED": seed}
        said.add(subprocess.run([sys.executable, "-c", CODE], capture_output=True, env=env, check=True).stdout)
    assert len(said) == 1 and b"three" in said.pop()
