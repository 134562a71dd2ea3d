#!/usr/bin/env python
"""Writes docs/limits.md: runs the tests that note a row of it, and sorts what they saw. Arguments go to pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.limits import PAGE, VARIABLE, Row, missing, render  # noqa: E402


def main() -> int:
    """Returns 0 when every row is shown and every test passed."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as noted:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "limits", *sys.argv[1:]]
        failed = subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: noted.name}, check=False).returncode
        rows = [Row(**json.loads(line)) for line in noted]
    text = render(rows)
    absent = missing(text)
    if failed or absent:
        print(
            f"docs/limits.md not written: a test failed: {bool(failed)}; rows not shown: {', '.join(absent) or 'none'}"
        )
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
