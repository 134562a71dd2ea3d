#!/usr/bin/env bash
# Sets everything up (once), then runs the tests. Arguments go to pytest: scripts/test.sh -m 'not ranks'
# Two files at a time: tests of ranks wait as long as they work. -n 0 for one after the other, in one process.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
test_packages
exec python -m pytest -n 2 --dist loadfile "$@"
