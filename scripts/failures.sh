#!/usr/bin/env bash
# Lets every fault of tests/cluster/faults befall a job on two hosts, and writes docs/failures.md: about 8 minutes on
# 2 cores, two jobs at a time: most of them wait. As root: the hosts are namespaces. Options go to pytest.
HVDTRAIN_SETUP=dev . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
test_packages
rows="$(mktemp)"
trap 'rm -f "$rows"' EXIT
HVDTRAIN_FAILURES="$rows" python -m pytest -q -n 3 -m "" tests/cluster/faults -k test_fault "$@"
python tests/cluster/faults/failure_page.py "$rows"
