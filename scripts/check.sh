#!/usr/bin/env bash
# What to run before each commit: ruff, its formatter, mypy, the floors of the package, then the quick tests.
#   scripts/check.sh --lint   without the tests
HVDTRAIN_SETUP=dev . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
started=$SECONDS
ruff check -q hvdtrain tests scripts
ruff format --check -q hvdtrain tests scripts
mypy
python scripts/structure.py | tail -n 2
if [ "${1:-}" != --lint ]; then scripts/test.sh --quick "$@"; fi
say "checked in $((SECONDS - started)) s"
