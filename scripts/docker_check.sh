#!/usr/bin/env bash
# Builds the images and shows that they work: a CPU image that trains, CUDA images with NCCL for PyTorch and for TensorFlow
# (no GPU is needed), a cluster of two containers, and what must never be in an image. Prints sizes and times as a table, and as JSON.
#
#   scripts/docker_check.sh                        everything
#   scripts/docker_check.sh --only lint,cpu        parts of it: lint, cpu, cuda, cuda-tensorflow, compose (which uses the CPU
#                                                  image)
#   scripts/docker_check.sh --keep DIR             keeps images and build cache, and goes on from them the next time
#   scripts/docker_check.sh --json FILE            the figures as JSON, there instead of on standard output
#
#   BASE_IMAGE   (default: debian:bookworm-slim; made by debootstrap where no registry can be reached)
#   DISTRIBUTION and MIRROR of such a base       (default: bookworm, http://deb.debian.org/debian)
#
# Where no Docker engine answers, one is started for the time of the check, with its own data folder and without any
# change to the machine's network; it needs root and about 30 GB for the CUDA image. Everything is removed at the end,
# on failure and Ctrl-C too. With root, missing programs are installed through apt.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ALL_PARTS=lint,cpu,cuda,cuda-tensorflow,compose
PARTS=$ALL_PARTS
KEEP=""
JSON=""
BASE_IMAGE=${BASE_IMAGE:-debian:bookworm-slim}
BUILD_IMAGE=""
LEAST_ACCURACY=0.97 # of keras_mnist on the digits
TRAIN_TIMEOUT_S=1200 # it takes half a minute on 2 quiet cores
PROJECT=hvdtrain-check-$$
WORK=""
ENGINE_PID=""
CHILD=""
IMAGES=()

say() { printf 'docker_check: %s\n' "$*" >&2; }
die() { printf 'docker_check: FAILED: %s\n' "$*" >&2; exit 1; }
wants() { case ,$PARTS, in *,$1,*) ;; *) return 1 ;; esac; }
record() { printf '%s\t%s\t%s\n' "$@" >>"$WORK/figures"; } # part, name with its unit, value
seconds_since() { echo $((SECONDS - $1)); }

# logged NAME COMMAND...: the output goes to a log, its end is shown on failure. The command is a process group of its
# own that the script waits for, so that a signal ends both at once.
logged() {
  local log=$WORK/$1.log; shift
  set -m
  "$@" >"$log" 2>&1 </dev/null &
  CHILD=$!
  set +m
  if wait "$CHILD"; then CHILD=""; return; fi
  CHILD=""
  tail -n 40 "$log" >&2
  die "$*"
}

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --only) PARTS=${2:?--only needs parts}; shift ;;
      --keep) KEEP=$(realpath -m "${2:?--keep needs a folder}"); shift ;;
      --json) JSON=${2:?--json needs a file}; shift ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; die "unknown argument '$1'" ;;
    esac
    shift
  done
  local part
  for part in ${PARTS//,/ }; do
    case ,$ALL_PARTS, in *",$part,"*) ;; *) die "--only takes ${ALL_PARTS//,/, }; not '$part'" ;; esac
  done
}

clean_up() {
  local code=$?
  trap - EXIT
  trap '' INT TERM
  set +e
  [ -z "$CHILD" ] || kill -TERM -- "-$CHILD" 2>/dev/null
  if [ -n "${DOCKER_READY:-}" ]; then
    compose down --volumes --timeout 5 >/dev/null 2>&1
    docker ps -aq --filter "label=$PROJECT" | xargs -r docker rm -f >/dev/null 2>&1
    docker network rm "$PROJECT" >/dev/null 2>&1
    docker volume rm -f "$PROJECT" >/dev/null 2>&1
    [ -n "$KEEP" ] || [ ${#IMAGES[@]} -eq 0 ] || docker rmi "${IMAGES[@]}" >/dev/null 2>&1
  fi
  stop_engine
  if [ -n "$WORK" ] && [[ $code != 0 && $code != 130 && $code != 143 ]]; then
    mkdir -p "${TMPDIR:-/tmp}/$PROJECT-logs" && cp "$WORK"/*.log "${TMPDIR:-/tmp}/$PROJECT-logs/" 2>/dev/null
    say "logs: ${TMPDIR:-/tmp}/$PROJECT-logs"
  fi
  [ -z "$WORK" ] || rm -rf "$WORK"
  exit "$code"
}

# ---- programs

install_packages() {
  [ $# -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "missing: $*. Install them with this system's package manager"
  [ "$(id -u)" = 0 ] || die "missing programs. Run: sudo apt-get install -y $*"
  say "installing $*"
  logged apt-update apt-get update -q
  # RUNLEVEL=1: the packages must not start services of their own
  logged apt-install env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends "$@"
}

engine_answers() { timeout 20 docker info >"$WORK/info" 2>&1 && grep -q 'Server Version' "$WORK/info"; }

install_missing() {
  local missing=()
  command -v docker >/dev/null || missing+=(docker.io)
  if [ ${#missing[@]} -gt 0 ] || ! engine_answers; then
    command -v dockerd >/dev/null || missing=(docker.io)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
  fi
  if wants compose && ! docker compose version >/dev/null 2>&1; then
    command -v docker-compose >/dev/null || missing+=(docker-compose)
  fi
  install_packages "${missing[@]}"
}

compose() {
  local command=(docker-compose)
  if docker compose version >/dev/null 2>&1; then command=(docker compose); fi
  timeout --foreground "$TRAIN_TIMEOUT_S" "${command[@]}" --project-name "$PROJECT" --file docker/compose.yaml "$@"
}

# ---- the engine

start_engine() {
  if engine_answers; then
    say "using the engine that runs here: $(docker version --format '{{.Server.Version}}')"
    DOCKER_READY=1
    return
  fi
  [ "$(id -u)" = 0 ] || die "no Docker engine answers, and only root can start one. Start Docker, or run this with sudo"
  export DOCKER_HOST=unix://$WORK/engine.sock
  local driver
  for driver in overlay2 vfs; do # vfs copies every layer: slow and large, but it works on any file system
    if try_engine "$driver"; then
      say "started an engine of its own: $(docker version --format '{{.Server.Version}}'), $driver, data in ${KEEP:-$WORK}"
      DOCKER_READY=1
      return
    fi
    stop_engine
  done
  tail -n 20 "$WORK/engine.log" >&2
  die "no Docker engine can be started here"
}

# In a session of its own, so that Ctrl-C leaves it to clean_up, and in a mount namespace of its own, so that its mounts
# end with it; if this script is killed, it ends. It leaves firewall, forwarding and bridges alone.
try_engine() {
  setsid setpriv --pdeathsig TERM unshare --mount dockerd \
    --host "$DOCKER_HOST" --data-root "${KEEP:-$WORK/engine}" --exec-root "$WORK/exec" --pidfile "$WORK/engine.pid" \
    --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --bridge=none --storage-driver="$1" \
    >"$WORK/engine.log" 2>&1 </dev/null &
  ENGINE_PID=$!
  local deadline=$((SECONDS + 60))
  until engine_answers; do
    kill -0 "$ENGINE_PID" 2>/dev/null && [ $SECONDS -lt $deadline ] || return 1
    sleep 0.2
  done
}

stop_engine() {
  [ -n "$ENGINE_PID" ] || return 0
  kill -TERM "$ENGINE_PID" 2>/dev/null
  timeout 60 tail --pid="$ENGINE_PID" -f /dev/null || kill -KILL "$ENGINE_PID"
  wait "$ENGINE_PID" 2>/dev/null
  ENGINE_PID=""
}

# ---- the base image

have_base() {
  docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 || timeout 120 docker pull -q "$BASE_IMAGE" >"$WORK/pull.log" 2>&1 ||
    make_base
  machine_certificates || { BUILD_IMAGE=$BASE_IMAGE; return; }
  # This machine has certificates of its own (a proxy's, a mirror's): the builder stages need them, the image does not.
  say "giving the builder stages this machine's certificates"
  mkdir "$WORK/certificates"
  cp "${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}" "$WORK/certificates/machine.crt"
  printf 'FROM %s\nCOPY machine.crt /usr/local/share/ca-certificates/machine.crt\n' "$BASE_IMAGE" >"$WORK/certificates/Dockerfile"
  BUILD_IMAGE=$PROJECT-build
  logged certificates docker build -t "$BUILD_IMAGE" "$WORK/certificates"
  IMAGES+=("$BUILD_IMAGE")
}

machine_certificates() {
  [ -n "${PIP_CERT:-}${SSL_CERT_FILE:-}${REQUESTS_CA_BUNDLE:-}" ] || compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null
}

# Debian's own tool makes what the slim image is: the minimal system, without documentation and translations.
make_base() {
  local distribution=${DISTRIBUTION:-bookworm} root=$WORK/base started=$SECONDS
  BASE_IMAGE=hvdtrain-base:$distribution
  [ -n "$KEEP" ] && docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && return
  say "no registry can be reached: making $BASE_IMAGE by debootstrap"
  logged debootstrap debootstrap --variant=minbase --include=ca-certificates "$distribution" "$root" \
    "${MIRROR:-http://deb.debian.org/debian}"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,info,locale}/*
  tar -C "$root" -c . | docker import - "$BASE_IMAGE" >/dev/null
  IMAGES+=("$BASE_IMAGE")
  rm -rf "$root"
  record base make_s "$(seconds_since "$started")"
}

# ---- building

build() {
  local variant=$1 tag=hvdtrain-check:$1 started=$SECONDS name arguments=()
  # by name only: the builder takes the values, which may hold passwords, from the environment
  for name in HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy PIP_INDEX_URL; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name")
  done
  docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
  say "building the $variant image (2 quiet cores: about $([ "$variant" = cpu ] && echo 7 || echo 15) minutes)"
  IMAGES+=("$tag")
  logged "build-$variant" docker build --network host --file docker/Dockerfile --tag "$tag" \
    --build-arg VARIANT="$variant" --build-arg BASE_IMAGE="$BASE_IMAGE" --build-arg BUILD_IMAGE="$BUILD_IMAGE" \
    --build-arg VERSION="$(sed -n 's/^version = //p' setup.cfg)" --build-arg CREATED="$(date -u +%FT%TZ)" \
    --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" "${arguments[@]}" .
  record "$variant" build_s "$(seconds_since "$started")"
  record "$variant" size_bytes "$(docker image inspect --format '{{.Size}}' "$tag")"
}

# in_image VARIANT COMMAND...: as users run it, with fewer rights than Docker gives by default
in_image() {
  local tag=hvdtrain-check:$1; shift
  timeout --foreground "$TRAIN_TIMEOUT_S" docker run --rm --label "$PROJECT" --network "$PROJECT" --cap-drop ALL \
    --security-opt no-new-privileges --shm-size 512m "$tag" "$@"
}

. scripts/docker_check_parts.sh

main() {
  parse "$@"
  WORK=$(mktemp -d "${TMPDIR:-/tmp}/hvdtrain-docker.XXXXXX")
  : >"$WORK/figures"
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  if wants lint; then check_lint; fi
  if [ "$PARTS" != lint ]; then
    install_missing
    start_engine
    docker network create --label "$PROJECT" "$PROJECT" >/dev/null
    have_base
  fi
  if wants cpu || wants compose; then build cpu; fi
  if wants cpu; then check_cpu; fi
  if wants compose; then check_compose; fi
  if wants cuda; then build cuda; check_cuda cuda torch; fi
  if wants cuda-tensorflow; then build cuda-tensorflow; check_cuda cuda-tensorflow tensorflow; fi
  show_figures
  say "all of it holds: $PARTS"
}

main "$@"
