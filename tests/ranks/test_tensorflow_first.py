"""TensorFlow imported before PyTorch, and then the LLVM of `torch.compile`: each framework's own LLVM."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from harness import QUIET, THREADS

PROGRAM = """
import sys, tensorflow, torch, hvdtrain
if "init" in sys.argv:
    hvdtrain.init("torch", engine="solo")
from triton._C.libtriton import llvm  # as torch.compile does; to compile takes a minute
llvm.init_targets()
llvm.context()
print("both")
"""


@pytest.mark.parametrize(
    "init", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["hvdtrain.init", "without"]
)
def test_torch_compile_after_tensorflow(init):
    """The twin: what happens without. Should that work one day, load_triton_apart has nothing to do any more."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("this PyTorch is a build for CPUs, which comes without Triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(["init"] if init else [])],
        capture_output=True, text=True, timeout=280, env={**os.environ, **QUIET, **THREADS},
    )  # fmt: skip
    if init:
        assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["both", ""]), done.stderr[-3000:]
    else:
        assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr[-3000:]
