#!/usr/bin/env bash
# What to run before each commit: ruff, its formatter, mypy, the floors of the package, the spelling and the words of
# pages and messages (scripts/style.py), then the quick tests.
#   scripts/check.sh --lint   without the tests
HVDTRAIN_SETUP=dev . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
started=$SECONDS
mypy &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT
ruff check -q hvdtrain tests scripts
ruff format --check -q hvdtrain tests scripts
python scripts/structure.py | tail -n 2
python scripts/style.py --pages | xargs codespell -D - -D scripts/style.txt
python scripts/style.py --texts | codespell -D - -D scripts/style.txt -
wait "$mypy"
if [ "${1:-}" != --lint ]; then scripts/test.sh --quick "$@"; fi
say "checked in $((SECONDS - started)) s"
