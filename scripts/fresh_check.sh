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

work=$(mktemp -d "${TMPDIR:-/var/tmp}/hvdtrain-fresh.XXXXXX")
clean() { [ -n "$keep" ] || rm -rf --one-file-system "$work"; }
trap clean EXIT
trap 'exit 130' INT TERM

# what pip and certificates need: names of variables, not their values
kept=$(env | grep -oE '^(PIP_[A-Z_]*|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|[a-z]+_proxy|[A-Z]+_PROXY)=' | tr -d = || true)

make_system() {  # suite folder
  local script=/usr/share/debootstrap/scripts/$1
  [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid  # a release that is newer than debootstrap
  debootstrap --variant=minbase --include=ca-certificates "$1" "$2" "$mirror" "$script" >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log" >&2; die "debootstrap failed for $1"; }
  cp /etc/resolv.conf /etc/hosts "$2/etc/"
  cp -L /etc/ssl/certs/ca-certificates.crt "$2/etc/ssl/certs/ca-certificates.crt"
  [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$2/etc/pip.conf"
  chroot "$2" useradd --create-home --shell /bin/bash user
}

# inside FOLDER USER COMMAND...: the command there, in mounts and processes of its own that end with it
inside() {
  local root=$1 user=$2 name values=() bind; shift 2
  for name in $kept; do values+=("$name=${!name}"); done
  [ -z "$cache" ] || values+=(PIP_CACHE_DIR=/cache/pip HVDTRAIN_CACHE=/cache/hvdtrain)
  ROOT=$root CACHE=$cache BINDS=$(printf '%s\n' "${binds[@]:-}") unshare --mount --pid --ipc --fork --kill-child bash -euc '
    mount -t proc proc "$ROOT/proc"; mount -t sysfs sysfs "$ROOT/sys"; mount --rbind /dev "$ROOT/dev"
    mount -t tmpfs tmpfs "$ROOT/dev/shm"
    while read -r bind; do
      [ -n "$bind" ] || continue
      mkdir -p "$ROOT$bind"; mount --bind -o ro "$bind" "$ROOT$bind"
    done <<<"$BINDS"
    [ -z "$CACHE" ] || { mkdir -p "$ROOT/cache"; mount --bind "$CACHE" "$ROOT/cache"; chmod 1777 "$ROOT/cache"; }
    exec chroot --userspec="$0:" "$ROOT" "$@"
  ' "$user" env -i "${values[@]}" HOME="$([ "$user" = root ] && echo /root || echo "/home/$user")" LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c "$*"
}

downloaded() { awk -F'[: ]+' '/:/ && !/lo:/ { sum += $3 } END { print int(sum / 1e6) }' /proc/net/dev; }

rows=()
failed=0
# run SYSTEM USER FOLDER COMMAND: one row; what the user is told to install is installed by root, and the command run again
run() {
  local system=$1 user=$2 root=$3 command=$4 started=$SECONDS before told result=passed log
  before=$(downloaded)
  log=$work/$system-$user-$(basename "${command%% *}").log
  while ! inside "$root" "$user" "cd /src && $command" >"$log" 2>&1 </dev/null; do
    told=$(grep -oE 'apt-get install -y .*' "$log" | tail -n 1 || true)
    if [ "$user" = root ] || [ -z "$told" ] || [ "$told" = "${last_told:-}" ]; then
      result=FAILED
      failed=1
      tail -n 15 "$log" | sed 's/^/    /' >&2
      break
    fi
    last_told=$told
    printf 'fresh_check:   the user was told: %s\n' "$told"
    inside "$root" root "apt-get update -q && DEBIAN_FRONTEND=noninteractive ${told/install/install --no-install-recommends}" \
      >>"$log" 2>&1
  done
  rows+=("$(printf '| %s | %s | %s | %d.%d | %d | %s |' "$system" "$user" "$command" $(((SECONDS - started) / 60)) \
    $(((SECONDS - started) % 60 / 6)) $(($(downloaded) - before)) "$result")")
  printf 'fresh_check: %s\n' "${rows[-1]}"
}

for system in "${systems[@]}"; do
  for user in "${users[@]}"; do
    root=$work/$system-$user
    printf 'fresh_check: %s as %s: making the system ...\n' "$system" "$user"
    make_system "$system" "$root"
    inside "$root" root "mkdir /src"
    git archive HEAD | tar -x -C "$root/src"
    chroot "$root" chown -R "$user" /src
    last_told=
    run "$system" "$user" "$root" scripts/train.sh
    run "$system" "$user" "$root" "scripts/test.sh${smoke:+ $smoke}"
    [ -n "$keep" ] || rm -rf --one-file-system "$root"
  done
done
printf '\n| system | user | command | minutes | MB downloaded | result |\n|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
exit $failed
