#!/usr/bin/env bash
# First command of every container: when it is one host of several, ssh is set up; then the given command takes over.
set -euo pipefail
/usr/local/lib/hvdtrain/ssh_host.sh setup
exec "$@"
