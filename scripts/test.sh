#!/usr/bin/env bash
# Sets everything up (once), then checks the sources and runs the tests.
#   scripts/test.sh --quick           only the tests that start no ranks and take no time
#   scripts/test.sh -m 'not ranks'    what pytest is given, without the checks of the sources
# Two files at a time: tests of ranks wait as long as they work. -n 0 for one after the other, in one process.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
test_packages
if [ "${1:-}" = --quick ]; then
  set -- -q -m "not ranks and not slow and not thorough" "${@:2}"
elif [ $# = 0 ]; then
  scripts/check.sh --lint
fi
exec python -m pytest -n 2 --dist loadfile "$@"
