# Makes this checkout ready to run: system packages, .venv with the pinned frameworks, and a Horovod built for them.
# Sourced by train.sh, test.sh and check.sh. Does only what is missing; when nothing is, it costs well under a second.
#
#   HVDTRAIN_SETUP    train: what training needs; test: pytest as well, for test.sh --smoke; dev: the developers' tools,
#                     for all tests   (default: train)
#   PYTHON            interpreter for a new .venv   (default: the newest of python3.10 to python3.13 on the PATH)
#   HVDTRAIN_VENV     where the environment lives   (default: .venv in the checkout)
#   HVDTRAIN_CACHE    where Horovod wheels are kept (default: ~/.cache/hvdtrain)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${HVDTRAIN_VENV:-$PWD/.venv}
SETUP_LOG=${TMPDIR:-/tmp}/hvdtrain-setup.$$.log

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# of pip and apt-get
NOT_REACHED='NewConnectionError|Connect(ion)?(Reset|Timeout|Refused)|ReadTimeout|ProxyError|name resolution|[Uu]nreachable'
NOT_REACHED+='|Could not (resolve|connect)|Connection (timed out|failed)'

# step "what (how long it usually takes)" command...: one line, the command's output in a log, its end on failure
step() {
  local what=$1 started=$SECONDS; shift
  say "$what ..."
  if ! "$@" >"$SETUP_LOG" 2>&1 </dev/null; then
    tail -n 30 "$SETUP_LOG" >&2
    if grep -qE "$NOT_REACHED" "$SETUP_LOG"; then
      say "the package index, or the mirror, was not reached: check the network, and pip's settings (pip config list)"
    fi
    die "failed: $what (whole log: $SETUP_LOG; command: $*)"
  fi
  say "  done in $((SECONDS - started)) s"
  rm -f "$SETUP_LOG"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3.10 python3}; do
    command -v "$candidate" >/dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  # where there is none at all, the system's is installed
  [ -z "${PYTHON:-}" ] && ! command -v python3 >/dev/null ||
    die "Python 3.10 to 3.13 is needed, and ${PYTHON:+PYTHON=}${PYTHON:-python3} is not one." \
      "Install one, or set PYTHON=/path/to/python3.13"
}

# What this system lacks to make the environment and, given "compile", Horovod. Debian splits the venv module and the
# headers from the interpreter. A user is told all of it at once. For root the compiler comes while pip downloads:
# `compiler_comes` is the process to wait for.
compiler_comes=
system_packages() {
  local first=() later=() python=$1
  [ -n "$python" ] || first+=(python3)
  venv_works || "${python:-false}" -c 'import ensurepip, venv' 2>/dev/null || first+=(python3-venv)
  command -v g++ >/dev/null || later+=(g++)
  command -v make >/dev/null || later+=(make)
  command -v cmake >/dev/null || later+=(cmake)
  command -v mpicxx >/dev/null || later+=(libopenmpi-dev)
  command -v mpirun >/dev/null || later+=(openmpi-bin)
  "${python:-false}" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || later+=(python3-dev)
  [ $((${#first[@]} + ${#later[@]})) -gt 0 ] || return 0
  local all=("${first[@]}" "${later[@]}")
  command -v apt-get >/dev/null || die "missing: ${all[*]}. Install them with this system's package manager"
  [ "$(id -u)" = 0 ] || die "system packages are missing. Run:" \
    "sudo apt-get update && sudo apt-get install -y --no-install-recommends ${all[*]}"
  step "reading the package lists (about 10 s)" apt-get update -q
  [ ${#first[@]} = 0 ] || apt_install "${first[@]}"
  if [ ${#later[@]} -gt 0 ]; then
    (SETUP_LOG=$SETUP_LOG.apt; apt_install "${later[@]}") &
    compiler_comes=$!
  fi
}

apt_install() {
  step "installing $* (about 30 s)" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
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
  apt_install "${missing[@]}"
}

# An environment that is whole: one whose making was stopped, or whose Python has gone, is made anew.
venv_works() { "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

check_folders() {
  local temporary=${TMPDIR:-/tmp}
  [ -d "$temporary" ] && [ -w "$temporary" ] || die "TMPDIR=$temporary is not a folder that can be written. Set TMPDIR=/tmp"
  [ ! -e "$VENV" ] || [ -f "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV" 2>/dev/null)" ] ||
    die "$VENV is not an environment of Python, and not empty. Set HVDTRAIN_VENV to a new folder, or leave it out"
}

# pip would say so after minutes, when the disk is full for everyone.
room_for_venv() {
  local needed=8 folder free
  folder=$(dirname "$VENV")
  while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
  free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  [ "$free" -ge $needed ] || die "a new environment needs $needed GB, and $folder has $free GB free. Make room, or set" \
    "HVDTRAIN_VENV to a folder on another disk"
}

# Everything the environment depends on; when it changes, set-up looks again.
fingerprint() {
  cat setup.cfg pyproject.toml hvdtrain/horovod_build/*.py hvdtrain/horovod_build/patches/* scripts/setup.sh | sha256sum | cut -c1-16
}

set_up() {
  local ready=$VENV/.ready wanted python extras=torch,keras,build,tensorboard,mpi what=${HVDTRAIN_SETUP:-train}
  local started=$SECONDS clear
  wanted=$(fingerprint)
  case "$what $(cat "$ready" 2>/dev/null || true)" in
    *" $wanted $what" | *" $wanted dev" | "train $wanted test") return 0 ;;
  esac
  check_folders
  python=$(find_python)
  venv_works || room_for_venv
  system_packages "$python"
  if ! venv_works; then
    [ -n "$python" ] || python=$(find_python)
    # what is there stays, unless its Python does not run
    "$VENV/bin/python" -c '' 2>/dev/null && clear= || clear=--clear
    step "making $VENV with $("$python" --version) (about 5 s)" "$python" -m venv $clear "$VENV"
  fi
  [ "$what" = train ] || extras+=,$what
  step "installing PyTorch, TensorFlow and Keras as pinned in setup.cfg (6.5 GB, about a minute)" \
    "$VENV/bin/python" -m pip install -q --no-compile --disable-pip-version-check -e ".[$extras]"
  [ -z "$compiler_comes" ] || wait "$compiler_comes" || exit 1
  say "building Horovod unless its wheel is cached (about 3 minutes on 2 cores, once a machine) ..."
  "$VENV/bin/python" -m hvdtrain build-horovod --install >&2 || die "Horovod could not be built: read the lines above"
  printf '%s\n' "$wanted $what" >"$ready"
  say "ready in $((SECONDS - started)) s"
}

set_up
export PATH=$VENV/bin:$PATH
