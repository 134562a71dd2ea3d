#!/usr/bin/env bash
# Makes this container one host of a cluster: its user gets into the other hosts by ssh, and they into this one.
#
#   hvdtrain-ssh-host               serve: sets up, then runs sshd until the container is stopped
#   hvdtrain-ssh-host setup         keys and settings only (every container does that first; without a key: nothing)
#   hvdtrain-ssh-host answers [S]   exit code 0 if no sshd was started here, or the one that was answers, or did so in the
#                                   last S seconds (each question is a line in its log)
#
# One private key is the cluster: whoever has it belongs to it. It comes from
#   HVDTRAIN_SSH_KEY      a file, such as a mounted secret                     (default: /run/secrets/hvdtrain_ssh_key)
#   HVDTRAIN_SSH_SHARED   a folder that all hosts share, such as a volume: the first one makes the key
# Each container makes its host key itself and signs it with the cluster's, so hosts know each other's keys without
# asking, and an unknown key is refused as ever. No key is part of the image.
#   HVDTRAIN_SSH_PORT     where sshd listens, and where the others are looked for                       (default: 2222)
#   HVDTRAIN_SSH_ADDRESS  addresses to listen at, with commas between them (default: all; with --network host, set it)
#   HVDTRAIN_SSH_NAMES    further names of this host, with commas between them: its host name and addresses are known
set -euo pipefail
umask 077
PORT=${HVDTRAIN_SSH_PORT:-2222}
OWN=${HOME:?}/.ssh/hvdtrain
SSHD=/usr/sbin/sshd
# What a shell of this container has and a rank started by ssh must have as well. Nothing secret: no patterns of names.
PASSED_ON="PATH LD_LIBRARY_PATH KERAS_BACKEND PYTHONUNBUFFERED OMPI_MCA_btl_vader_single_copy_mechanism
  NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES"

die() { printf 'hvdtrain-ssh-host: %s\n    fix: %s\n' "$1" "$2" >&2; exit 2; }

# OpenShift, say, gives a container a uid of its own choice.
named_user() {
  id -un >/dev/null 2>&1 ||
    die "uid $(id -u) has no name in this container: ssh and sshd refuse to work for it" \
      "run it as the image's user (Kubernetes: runAsUser: 1000), or build with --build-arg USER_ID=$(id -u)"
}

# The file of the cluster's private key; empty when this container belongs to no cluster.
cluster_key() {
  local key=${HVDTRAIN_SSH_KEY:-/run/secrets/hvdtrain_ssh_key} shared=${HVDTRAIN_SSH_SHARED:-}
  if [ -e "$key" ]; then
    named_user
    [ -r "$key" ] || die "the key file $key cannot be read by uid $(id -u)" "give it to that uid, mode 0400"
    printf '%s\n' "$key"
  elif [ -n "${HVDTRAIN_SSH_KEY:-}" ]; then
    die "HVDTRAIN_SSH_KEY names $key, which does not exist" "mount the secret there"
  elif [ -n "$shared" ]; then
    named_user
    [ -w "$shared" ] || die "the folder $shared cannot be written by uid $(id -u)" \
      "use a volume mounted at /cluster, or a folder that belongs to that uid"
    [ -e "$shared/id_ed25519" ] || make_cluster_key "$shared"
    printf '%s\n' "$shared/id_ed25519"
  fi
}

# All hosts start at once: each makes a key, the first link wins, and a key is never seen half written.
make_cluster_key() {
  local new=$1/.new.$HOSTNAME.$$
  ssh-keygen -q -t ed25519 -N '' -C 'hvdtrain cluster' -f "$new"
  ln "$new" "$1/id_ed25519" 2>/dev/null || [ -e "$1/id_ed25519" ] ||
    die "no key could be made in $1" "use a volume of the engine: the folder's file system knows no hard links"
  rm -f "$new" "$new.pub"
}

# Names and addresses by which others may reach this host, with commas between them.
own_names() {
  local names=$HOSTNAME
  names+=,$(hostname -f 2>/dev/null || hostname)
  names+=$(hostname -I 2>/dev/null | tr -s ' ' '\n' | sed '/^$/d; s/^/,/' | tr -d '\n')
  names+=${HVDTRAIN_SSH_NAMES:+,$HVDTRAIN_SSH_NAMES}
  printf '%s\n' "$names"
}

make_host_key() {
  [ -e "$OWN/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C "host $HOSTNAME" -f "$OWN/host_key"
  # signed at every start: addresses change
  ssh-keygen -q -s "$OWN/id" -h -I "host $HOSTNAME" -n "$(own_names)" "$OWN/host_key.pub" </dev/null
}

# One SetEnv line (sshd reads only the first) with the variables that are set and that its quotes can hold.
set_env_line() {
  local name value line=""
  for name in $PASSED_ON; do
    value=${!name:-}
    case $value in '' | *[\"\\]* | *$'\n'*) continue ;; esac
    line+=" \"$name=$value\""
  done
  printf 'SetEnv%s\n' "$line"
}

listen_lines() {
  local addresses=${HVDTRAIN_SSH_ADDRESS:-} address
  for address in ${addresses//,/ }; do printf 'ListenAddress %s\n' "$address"; done
}

write_server_settings() {
  cat >"$OWN/sshd_config" <<EOT
Port $PORT
$(listen_lines)
HostKey $OWN/host_key
HostCertificate $OWN/host_key-cert.pub
AllowUsers $(id -un)
AuthenticationMethods publickey
AuthorizedKeysFile $OWN/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
DisableForwarding yes
PermitUserEnvironment no
PidFile none
ClientAliveInterval 15
MaxStartups 200
$(set_env_line)
EOT
}

write_client_settings() {
  cat >"$OWN/config" <<EOT
Host *
  Port $PORT
  User $(id -un)
  IdentityFile $OWN/id
  IdentitiesOnly yes
  UserKnownHostsFile $OWN/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  PasswordAuthentication no
  ConnectTimeout 10
  ServerAliveInterval 15
EOT
  printf '@cert-authority * %s\n' "$(cat "$OWN/id.pub")" >"$OWN/known_hosts"
  local config=$HOME/.ssh/config include="Include hvdtrain/config"
  # the user's own settings stay, and come first
  grep -qsxF "$include" "$config" || printf '\nHost *\n%s\n' "$include" >>"$config"
}

setup() {
  local key
  key=$(cluster_key)
  [ -n "$key" ] || return 0
  case $PORT in '' | *[!0-9]*) die "HVDTRAIN_SSH_PORT must be a number, not '$PORT'" "HVDTRAIN_SSH_PORT=2222" ;; esac
  mkdir -p "$OWN"
  install -m 600 "$key" "$OWN/id"
  ssh-keygen -y -P '' -f "$OWN/id" >"$OWN/id.pub" 2>/dev/null ||
    die "$key is no private key, or it has a passphrase" "ssh-keygen -t ed25519 -N '' -f FILE"
  cp "$OWN/id.pub" "$OWN/authorized_keys"
  make_host_key
  write_server_settings
  write_client_settings
}

serve() {
  setup
  [ -e "$OWN/sshd_config" ] || die "this container has no cluster key" \
    "mount a private key at /run/secrets/hvdtrain_ssh_key, or a shared volume: -v cluster:/cluster -e HVDTRAIN_SSH_SHARED=/cluster"
  rm -f "$OWN/answered"
  touch "$OWN/serving"
  # in the foreground, its log on stderr
  exec "$SSHD" -D -e -f "$OWN/sshd_config"
}

# answers [SECONDS]. sshd speaks first: its greeting shows that it lives; a port that accepts does not.
answers() {
  [ -e "$OWN/serving" ] || return 0
  local address=${HVDTRAIN_SSH_ADDRESS:-127.0.0.1} greeting answered=0
  [ ! -e "$OWN/answered" ] || answered=$(<"$OWN/answered")
  [ $((EPOCHSECONDS - answered)) -ge "${1:-0}" ] || return 0
  exec 3<>"/dev/tcp/${address%%,*}/$PORT"
  # the greeting that is expected back: without it sshd reports an error
  printf 'SSH-2.0-health\r\n' >&3
  IFS= read -r -t 5 greeting <&3
  [[ $greeting == SSH-2.0-* ]]
  printf '%s\n' "$EPOCHSECONDS" >"$OWN/answered"
}

case ${1:-serve} in
  setup | serve | answers) "${@:-serve}" ;;
  *) die "unknown command '$1'" "hvdtrain-ssh-host [setup|serve|answers]" ;;
esac
