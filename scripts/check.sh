#!/usr/bin/env bash
# What to run before each commit (under 2 minutes): ruff, its formatter, mypy, and the tests that start nothing slow.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
started=$SECONDS
ruff check hvdtrain tests scripts
ruff format --check hvdtrain tests scripts
mypy
python scripts/structure.py | tail -n 2
python -m pytest -q -n 2 --dist loadfile --durations=0 --durations-min=5 -m "not ranks and not slow and not thorough" "$@"
say "checked in $((SECONDS - started)) s"
