#!/usr/bin/env bash
# Healthy: the environment is all there, and if this container serves ssh, its sshd answers.
set -euo pipefail
python -c 'import hvdtrain, horovod'
/usr/local/lib/hvdtrain/ssh_host.sh answers
