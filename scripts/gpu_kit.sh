#!/usr/bin/env bash
# Makes a folder with all that `gpu_check.sh` needs on a machine with a GPU and no network (default: gpu-kit, at most 60 MiB):
#   scripts/gpu_kit.sh [FOLDER] [--help]
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
[ ! -f .venv/bin/activate ] || . .venv/bin/activate
exec python scripts/gpu_kit.py "$@"
