#!/usr/bin/env bash
# Builds, proves and smoke-tests Horovod and hvdtrain on a covering set of versions, and writes docs/versions.md.
#   scripts/versions.sh                     all that have no row of today: about 12 minutes each on 2 cores
#   scripts/versions.sh --python 3.13 --torch 2.15.0 --tensorflow 2.21.0     one combination
#   scripts/versions.sh --newest            the index's newest releases, if they are newer than the table's
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/versions.py" "$@"
