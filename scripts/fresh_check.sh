#!/usr/bin/env bash
# Runs the README's two commands on bare systems, as root and as an ordinary user, and prints a table: minutes,
# downloaded megabytes, result. Needs root, debootstrap, 12 GB of disk; about 20 minutes a system and user on 2 cores.
#   scripts/fresh_check.sh                           Debian 12 and 13, root and user; test.sh with --smoke
#   scripts/fresh_check.sh --system trixie --user root
#   scripts/fresh_check.sh --whole                   test.sh without --smoke
#   scripts/fresh_check.sh --bind DIR                a folder of this machine that is seen there, too (a package index)
#   scripts/fresh_check.sh --cache DIR               keeps pip's and Horovod's downloads there, between runs
#   scripts/fresh_check.sh --keep                    leaves the systems in place, to look at
# Packages come from the mirror of this machine's apt, and pip's settings (PIP_*, certificates) from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
systems=() users=() binds=() smoke=--smoke cache='' keep=''
die() { printf 'fresh_check: %s\n' "$*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --system) systems+=("${2:?}"); shift ;;
    --user) users+=("${2:?}"); shift ;;
    --bind) binds+=("$(realpath "${2:?}")"); shift ;;
    --cache) mkdir -p "${2:?}"; cache=$(realpath "$2"); shift ;;
    --whole) smoke= ;;
    --keep) keep=1 ;;
    *) die "unknown option: $1 (see the head of $0)" ;;
  esac
  shift
done
[ ${#systems[@]} -gt 0 ] || systems=(bookworm trixie)
[ ${#users[@]} -gt 0 ] || users=(root user)
[ "$(id -u)" = 0 ] || die "needs root: it makes file systems. Run: sudo $0"
command -v debootstrap >/dev/null || die "debootstrap is missing. Run: apt-get install debootstrap"
mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -m 1 'debian/*$' || true)
[ -n "$mirror" ] || die "no Debian mirror in this machine's apt sources"

# What ends with this script, however it ends: its folder, and the command that runs, with all its mounts and processes.
set -m  # a command gets signals of its own: in the background of a script it would ignore Ctrl-C
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hvdtrain-fresh.XXXXXX")
running=
clean() {
  trap '' INT TERM HUP
  if [ -n "$running" ]; then
    pkill -KILL -P "$running" || true  # the first process of its namespace, and with it the others
    wait "$running" 2>/dev/null || true
  fi
  [ -n "$keep" ] || rm -rf --one-file-system "$work"
}
trap clean EXIT
trap 'exit 130' INT TERM HUP

contained() {
  local code=0
  unshare --mount --pid --ipc --fork --kill-child "$@" </dev/null & running=$!
  wait "$running" || code=$?
  running=
  return $code
}

# what pip and certificates need: names of variables, not their values
kept=$(env | grep -oE '^(PIP_[A-Z_]*|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|[a-z]+_proxy|[A-Z]+_PROXY)=' | tr -d = || true)

make_system() {  # suite folder
  local script=/usr/share/debootstrap/scripts/$1
  [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid  # a release that is newer than debootstrap
  contained debootstrap --variant=minbase --include=ca-certificates "$1" "$2" "$mirror" "$script" >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log" >&2; die "debootstrap failed for $1"; }
  cp /etc/resolv.conf /etc/hosts "$2/etc/"
  cp -L /etc/ssl/certs/ca-certificates.crt "$2/etc/ssl/certs/ca-certificates.crt"
  [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$2/etc/pip.conf"
  [ "${PIP_CONFIG_FILE:-/dev/null}" = /dev/null ] || install -D -m 644 "$PIP_CONFIG_FILE" "$2$PIP_CONFIG_FILE"
  chroot "$2" useradd --create-home --shell /bin/bash user
  mkdir "$2/src"
  git archive HEAD | tar -x -C "$2/src"
}

# inside FOLDER USER COMMAND: the command in /src there
inside() {
  local root=$1 user=$2 command=$3 name values=()
  for name in $kept; do values+=("$name=${!name}"); done
  [ -z "$cache" ] || values+=(PIP_CACHE_DIR="/cache/pip-$user" HVDTRAIN_CACHE="/cache/hvdtrain-$user")
  ROOT=$root CACHE=$cache BINDS=$(printf '%s\n' "${binds[@]:-}") contained bash -euc '
    mount -t proc proc "$ROOT/proc"; mount -t sysfs sysfs "$ROOT/sys"; mount --rbind /dev "$ROOT/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
    while read -r bind; do
      [ -n "$bind" ] || continue
      mkdir -p "$ROOT$bind"; mount --bind -o ro "$bind" "$ROOT$bind"
    done <<<"$BINDS"
    [ -z "$CACHE" ] || { mkdir -p "$ROOT/cache"; mount --bind "$CACHE" "$ROOT/cache"; chmod 1777 "$ROOT/cache"; }
    code=0; "$@" || code=$?; exit $code  # stays, to collect what others leave behind, as the first process must
  ' bash chroot "$root" su --login --shell /bin/bash "$user" --command "$(printf 'export %q;' LANG=C.UTF-8 "${values[@]}")
cd /src && $command"
}

downloaded() { awk '/:/ && !/lo:/ { sub(/.*:/, ""); sum += $1 } END { print int(sum / 1e6) }' /proc/net/dev; }

rows=()
failed=0
# run SYSTEM USER FOLDER COMMAND: one row; what the user is told to install is installed by root, and the command run again
run() {
  local system=$1 user=$2 root=$3 command=$4 started=$SECONDS before told last='' result=passed log seconds
  before=$(downloaded)
  log=$work/$system-$user-$(basename "${command%% *}").log
  until inside "$root" "$user" "$command" >"$log" 2>&1; do
    told=$(sed -n 's/^setup: .* Run: //p' "$log")
    if [ "$user" = root ] || [ -z "$told" ] || [ "$told" = "$last" ]; then
      result=FAILED failed=1
      break
    fi
    last=$told
    printf 'fresh_check: the user was told: %s\n' "$told"
    inside "$root" root "export DEBIAN_FRONTEND=noninteractive; ${told//sudo /}" >"$log" 2>&1 || { result=FAILED failed=1; break; }
  done
  [ $result = passed ] && tail -n 3 "$log" || tail -n 30 "$log"
  grep -E '^setup: .*(ready|done|tested) in' "$log" | tail -n 8 || true
  seconds=$((SECONDS - started))
  rows+=("$(printf '| %s | %s | `%s` | %d.%d | %d | %s |' "$system" "$user" "$command" $((seconds / 60)) \
    $((seconds % 60 / 6)) $(($(downloaded) - before)) "$result")")
  printf 'fresh_check: %s\n' "${rows[-1]}"
}

for system in "${systems[@]}"; do
  for user in "${users[@]}"; do
    root=$work/$system-$user
    printf 'fresh_check: %s as %s: making the system ...\n' "$system" "$user"
    make_system "$system" "$root"
    chroot "$root" chown -R "$user" /src
    for command in scripts/train.sh "scripts/test.sh${smoke:+ $smoke}"; do
      run "$system" "$user" "$root" "$command"
      [[ ${rows[-1]} != *FAILED* ]] || break
    done
    [ -n "$keep" ] || rm -rf --one-file-system "$root"
  done
done
printf '\n| system | user | command | minutes | MB downloaded | result |\n|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
exit $failed
