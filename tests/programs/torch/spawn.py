"""Forks processes with the variables that a cluster's launcher would give them, and ends when all have ended.

Usage: spawn.py ENVIRONMENTS PROGRAM [ARGUMENT ...], ENVIRONMENTS being a JSON list of one object a process. Ends with
the first exit code that is not 0; then the others are ended, as launchers do. PyTorch is imported once for all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import wait

import torch  # noqa: F401


def become(variables: dict[str, str], program: list[str]) -> None:
    os.environ.update(variables)
    sys.argv, sys.path[0] = program, os.path.dirname(program[0])
    runpy.run_path(program[0], run_name="__main__")


def main(environments: str, *program: str) -> int:
    forks = multiprocessing.get_context("fork")
    children = [forks.Process(target=become, args=(its, list(program))) for its in json.loads(environments)]
    for child in children:
        child.start()
    while waiting := [child for child in children if child.exitcode is None]:
        wait([child.sentinel for child in waiting])
        if code := next((child.exitcode for child in children if child.exitcode), 0):
            for child in waiting:
                child.terminate()
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
