# Makes this checkout ready to run: system packages, .venv with the pinned frameworks, and a Horovod built for them.
# Sourced by train.sh and test.sh. Does only what is missing; when nothing is, it costs well under a second.
#
#   PYTHON            interpreter for a new .venv   (default: the first of python3.12, python3.11, python3 that fits)
#   HVDTRAIN_VENV     where the environment lives   (default: .venv in the checkout)
#   HVDTRAIN_CACHE    where Horovod wheels are kept (default: ~/.cache/hvdtrain)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${HVDTRAIN_VENV:-$PWD/.venv}
SETUP_LOG=${TMPDIR:-/tmp}/hvdtrain-setup.$$.log

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# step "what (how long it usually takes)" command...: one line, the command's output in a log, its end on failure
step() {
  local what=$1 started=$SECONDS; shift
  say "$what ..."
  if ! "$@" >"$SETUP_LOG" 2>&1 </dev/null; then
    tail -n 30 "$SETUP_LOG" >&2
    die "failed: $what (whole log: $SETUP_LOG; command: $*)"
  fi
  say "  done in $((SECONDS - started)) s"
  rm -f "$SETUP_LOG"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "Python 3.11 or 3.12 is needed; found: $(python3 --version 2>&1 || echo none). Install one, or set PYTHON=/path/to/python3.12"
}

system_packages() {
  local missing=() python=$1
  command -v g++ >/dev/null || missing+=(g++)
  command -v make >/dev/null || missing+=(make)
  command -v cmake >/dev/null || missing+=(cmake)
  command -v mpicxx >/dev/null || missing+=(libopenmpi-dev)
  command -v mpirun >/dev/null || missing+=(openmpi-bin)
  # Debian splits the venv module and the headers from the interpreter
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] || missing+=(python3-dev)
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "missing: ${missing[*]}. Install them with this system's package manager"
  [ "$(id -u)" = 0 ] || die "missing system packages. Run: sudo apt-get install -y ${missing[*]}"
  step "reading the package lists (about 10 s)" apt-get update -q
  step "installing ${missing[*]} (about 30 s)" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends "${missing[@]}"
}

# What only the tests need: hosts made of network namespaces, with an sshd each, and a Slurm. Where they cannot be
# installed, or where systemd would start the packages' services at once, the tests that need them say so and skip.
test_packages() {
  local missing=()
  [ -x /usr/sbin/sshd ] || missing+=(openssh-server)
  command -v ssh >/dev/null || missing+=(openssh-client)
  [ -x /usr/sbin/ip ] || [ -x /sbin/ip ] || missing+=(iproute2)
  [ -x /usr/sbin/slurmctld ] || missing+=(slurmctld slurmd slurm-client munge)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || [ -d /run/systemd/system ]; then
    say "some tests will be skipped without: ${missing[*]} (apt-get install them; their services need not run)"
    return 0
  fi
  step "reading the package lists (about 10 s)" apt-get update -q
  step "installing ${missing[*]} for the tests (about 30 s)" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends "${missing[@]}"
}

# Everything the environment depends on; when it changes, set-up looks again.
fingerprint() {
  cat setup.cfg pyproject.toml hvdtrain/horovod_build/*.py hvdtrain/horovod_build/patches/* scripts/setup.sh | sha256sum | cut -c1-16
}

set_up() {
  local ready=$VENV/.ready wanted python
  wanted=$(fingerprint)
  [ -e "$ready" ] && [ "$(cat "$ready")" = "$wanted" ] && return 0
  python=$(find_python)
  system_packages "$python"
  if [ ! -x "$VENV/bin/python" ]; then
    step "making $VENV with $("$python" --version) (about 5 s)" "$python" -m venv "$VENV"
  fi
  step "installing PyTorch, TensorFlow and Keras as pinned in setup.cfg (6.5 GB, about 2 minutes)" \
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check -e '.[torch,keras,build,tensorboard,mpi,dev]'
  say "building Horovod unless its wheel is cached (about 4 minutes on 2 cores, once a machine) ..."
  "$VENV/bin/python" -m hvdtrain build-horovod --install >&2 || die "Horovod could not be built: read the lines above"
  printf '%s\n' "$wanted" >"$ready"
  say "ready"
}

set_up
export PATH=$VENV/bin:$PATH
