#!/usr/bin/env bash
# health.sh [SECONDS]: healthy if the environment is all there and, where this container serves ssh, sshd answers, or did
# in the last SECONDS.
set -euo pipefail
python -c 'import hvdtrain, horovod'
/usr/local/lib/hvdtrain/ssh_host.sh answers "$@"
