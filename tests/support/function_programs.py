"""Programs of a user's that call `hvdtrain.run`: started as users start them, and nothing is left of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

from harness import clean_environment, kill_all, outlive
from starter_process import TOKEN

TIMEOUT_S = 90


@contextlib.contextmanager
def started(folder: Path, text: str, *, stdin: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Starts a program of this text, from a file or, as notebooks have none, from standard input; leaves nothing."""
    token = uuid.uuid4().hex
    program = "import hvdtrain, os, sys\n" + textwrap.dedent(text)
    (folder / "train.py").write_text(program)
    process = subprocess.Popen(
        [sys.executable, "-" if stdin else "train.py"], cwd=folder, text=True, stdin=-1, stdout=-1, stderr=-1,
        env=clean_environment({TOKEN: token}), start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    if stdin:
        process.stdin.write(program)
        process.stdin.close()
        process.stdin = None
    try:
        yield process
        left = outlive(token, 8)
        assert not left, f"left behind: {[' '.join(its.cmdline()) for its in left]}"
    finally:
        kill_all(token)
        process.communicate()


def output(folder: Path, text: str, *, stdin: bool = False) -> str:
    """Returns what such a program wrote, which must end well."""
    with started(folder, text, stdin=stdin) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"{out}\n{err}"
    return f"{out}\n--- stderr\n{err}"
