"""Starts processes with the variables that a cluster's launcher would give them, and ends when all have ended.

Usage: spawn.py ENVIRONMENTS PROGRAM [ARGUMENT ...], ENVIRONMENTS being a JSON list of one object a process. Ends with
the first exit code that is not 0; then the others are ended, as launchers do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys


def main(environments: str, *command: str) -> int:
    children = [
        subprocess.Popen([sys.executable, *command], env={**os.environ, **variables})
        for variables in json.loads(environments)
    ]
    waiting = dict(enumerate(children))
    while waiting:
        for index, child in list(waiting.items()):
            try:
                code = child.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            del waiting[index]
            if code:
                for other in waiting.values():
                    other.terminate()
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
