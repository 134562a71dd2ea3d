#!/usr/bin/env python
"""Writes docs/limits.md from what the tests that note a row of it saw.

scripts/limits.py                    runs these tests (about 15 minutes on 2 cores), then writes; options go to pytest
HVDTRAIN_LIMITS=rows scripts/test.sh; scripts/limits.py --rows rows        writes what a run of the tests has noted
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from limits import PAGE, VARIABLE, Row, missing, render  # noqa: E402


def main() -> int:
    """Returns 0 when every row is shown and every test passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="a file of rows that a run of the tests has noted")
    args, others = parser.parse_known_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        noted = args.rows or Path(folder) / "rows"
        if args.rows is None:
            command = [sys.executable, "-m", "pytest", "-q", "-m", "limits and not thorough", *others]
            failed = subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: str(noted)}, check=False).returncode
        rows = [Row(**json.loads(line)) for line in noted.read_text(encoding="utf-8").splitlines()]
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
