"""Horovod's own TensorFlow all-reduce within functions that XLA compiles (patch xla-ops)."""

from __future__ import annotations

import pytest
from harness import REPOSITORY, run_ranks

PROGRAM = [REPOSITORY / "tests" / "programs" / "horovods_xla.py"]


def test_a_compiled_step_of_two_ranks_is_one_processs_step():
    result = run_ranks(PROGRAM, 2, launcher="horovodrun", env={"HOROVOD_ENABLE_XLA_OPS": "1"}).check()
    for output in result.ranks_output.values():
        assert float(output.split("worst")[1].split()[0]) < 1e-10, output


@pytest.mark.thorough
def test_without_asking_for_it_the_operation_that_xla_cannot_compile_is_named():
    """The twin. As upstream, XLA's kernels are there when HOROVOD_ENABLE_XLA_OPS asks for them."""
    result = run_ranks(PROGRAM, 2, launcher="horovodrun")
    assert result.returncode != 0
    assert "unsupported operations" in result.err and "HorovodAllreduce" in result.err, result.err
