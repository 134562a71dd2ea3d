"""MNIST from every source, the embedded digits, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

# ---- the embedded digits


@pytest.mark.thorough
def test_digits_are_scikit_learns() -> None:
    """A digest in the unit tests also shows a change; this shows where they come from."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed (pip install scikit-learn: each TensorFlow process then imports it)")
    code = (
        "from sklearn.datasets import load_digits; from hvdtrain.datasets import digits;"
        "published = load_digits(); images, labels = digits.originals();"
        "assert (images == published.images).all() and (labels == published.target).all()"
    )  # in a process of its own: scikit-learn imports torch where there is one
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
