#!/usr/bin/env bash
# Sets everything up (once), then runs the tests. Arguments go to pytest: scripts/test.sh -m 'not ranks'
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
test_packages
exec python -m pytest "$@"
