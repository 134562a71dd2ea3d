"""Horovod's own runners for Ray and Spark, with today's releases of both, and hvdtrain in their functions."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import uuid

import pytest
from harness import PROGRAMS, clean_environment, kill_all
from starter_process import TOKEN


@pytest.mark.thorough
@pytest.mark.parametrize(("runner", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_it_trains_there_as_in_one_process(tmp_path, runner, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which nothing else does: pip install {package}")
    token = uuid.uuid4().hex
    command = [sys.executable, str(PROGRAMS / "cluster/runner_of_horovod.py"), runner]
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean_environment({TOKEN: token}), capture_output=True, text=True, timeout=500
        )
    finally:
        kill_all(token)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "rank 1: " in done.stdout
