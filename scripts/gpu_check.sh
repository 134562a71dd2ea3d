#!/usr/bin/env bash
# Is hvdtrain right and fast on this machine's GPU? Under nine minutes, no network: one table, one JSON file, an exit code.
#   gpu_check.sh [--dry-run] [--only CHECK ...] [--out FILE] [--device cpu --tiny]      (`hvdtrain bench gpu --help`)
# In a folder made by gpu_kit.sh its wheels are used: those that this machine's Python lacks; PYTHON=... chooses which.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ -d "$here/wheels" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" "$here/missing.py" "$here/wheels" | xargs -r "$python" -m pip install -q --no-index --no-deps --no-compile \
        --disable-pip-version-check --root-user-action=ignore --target "$site"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
else
    cd "$here/.."
    # shellcheck source=/dev/null
    [ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || . .venv/bin/activate
    python=${PYTHON:-python}
fi
"$python" -m hvdtrain bench gpu "$@"
