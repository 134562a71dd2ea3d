#!/usr/bin/env bash
# Log-ins without a password from this machine to a list of hosts, and between them: what horovodrun, mpirun and
# `hvdtrain launch` need. Run it again at any time: it does only what is missing.
#
#   scripts/ssh_setup.sh host1 host2 host3          asks for each host key it does not know, then for passwords
#   scripts/ssh_setup.sh --known-hosts FILE HOST... takes host keys from FILE, as your administrator gives them out
#   scripts/ssh_setup.sh --fingerprint host1=SHA256:... host1 ...       learns host1's key if it has this fingerprint
#
#   HOST              a name that ssh knows, or user@name
#   --one-way         only from this machine to the hosts, not between them
#   --identity FILE   the key to log in with; made if it is missing      (default: ~/.ssh/id_ed25519)
#   --port N          of the hosts' sshd                                  (default: as ssh is configured)
#
# Host-key checking stays on: a key that is new is shown with its fingerprint and must be confirmed, one that has
# changed is refused. Every host keeps its own private key. Exit code: 0 all log-ins work, 2 something was refused.

set -euo pipefail

say() { printf 'ssh_setup: %s\n' "$*"; }
refuse() { printf 'ssh_setup: %s\n' "$@" >&2; exit 2; }
usage() { sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

IDENTITY=$HOME/.ssh/id_ed25519
KNOWN=$HOME/.ssh/known_hosts
GIVEN='' PORT='' ONE_WAY=
HOSTS=()
declare -A FINGERPRINTS=()

parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --one-way) ONE_WAY=1; shift; continue ;;
      --identity | --port | --known-hosts | --fingerprint)
        [ $# -gt 1 ] || refuse "$1 needs a value" ;;&
      --identity) IDENTITY=$2 ;;
      --port) PORT=$2 ;;
      --known-hosts) GIVEN=$2 ;;
      --fingerprint)
        [[ $2 =~ ^[^=]+=SHA256:[A-Za-z0-9+/]+$ ]] || refuse "--fingerprint is HOST=SHA256:..., received: $2"
        FINGERPRINTS[${2%%=*}]=${2#*=} ;;
      -*) refuse "no such flag: $1" "  fix: $0 --help" ;;
      *) HOSTS+=("$1"); shift; continue ;;
    esac
    shift 2
  done
  [ ${#HOSTS[@]} -gt 0 ] || { usage >&2; exit 2; }
  local host
  for host in "${HOSTS[@]}"; do # nothing that a shell or ssh takes for something else than a name
    [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
      refuse "a host is a name of letters, digits, '.', '_' and '-', or user@name" "  received: $(printf %q "$host")"
  done
  [[ $PORT =~ ^[0-9]*$ ]] || refuse "--port is a number" "  received: $(printf %q "$PORT")"
  [ -z "$GIVEN" ] || [ -r "$GIVEN" ] || refuse "--known-hosts: cannot read $GIVEN"
}

ssh_options() { printf '%s\n' -o StrictHostKeyChecking=yes -o ConnectTimeout=10 ${PORT:+-p "$PORT"} -i "$IDENTITY"; }

# on HOST COMMAND...: without any question
on() {
  local options
  mapfile -t options < <(ssh_options)
  ssh -o BatchMode=yes "${options[@]}" -- "$@"
}

make_key() {
  (umask 077; mkdir -p "$HOME/.ssh")
  [ -e "$IDENTITY" ] && return
  ssh-keygen -q -t ed25519 -N '' -C "${USER:-user}@$(uname -n)" -f "$IDENTITY"
  say "made the key $IDENTITY"
}

# What ssh calls the host in known_hosts, after ssh's own configuration: a name, or [name]:port
known_as() {
  local settings name port alias
  settings=$(ssh -G ${PORT:+-p "$PORT"} -- "$1")
  name=$(awk '$1 == "hostname" { print $2 }' <<<"$settings")
  port=$(awk '$1 == "port" { print $2 }' <<<"$settings")
  alias=$(awk '$1 == "hostkeyalias" { print $2 }' <<<"$settings")
  if [ -n "$alias" ] && [ "$alias" != none ]; then printf '%s\n' "$alias"
  elif [ "$port" = 22 ]; then printf '%s\n' "$name"
  else printf '[%s]:%s\n' "$name" "$port"; fi
}

# Lines of known_hosts files for a name; the user's own, then the machine's
lines_for() {
  local file
  for file in "$KNOWN" /etc/ssh/ssh_known_hosts; do
    [ ! -r "$file" ] || ssh-keygen -F "$1" -f "$file" 2>/dev/null | sed '/^#/d'
  done
}

append() { # FILE LINE...: each on a line of its own, also after a last line that has no end
  local file=$1; shift
  [ ! -s "$file" ] || [ -z "$(tail -c 1 "$file")" ] || echo >>"$file"
  printf '%s\n' "$@" >>"$file"
}

# Learns a host's key, if it is not known, from what the user trusts: a file, a fingerprint, or an answer
learn() {
  local host=$1 name=${1#*@} as found
  as=$(known_as "$host")
  [ -z "$(lines_for "$as")" ] || return 0
  if [ -n "$GIVEN" ]; then
    found=$(ssh-keygen -F "$as" -f "$GIVEN" | sed '/^#/d') || true
    [ -n "$found" ] ||
      refuse "$host: its key is neither known here nor in $GIVEN" "  fix: add its line for $as to that file"
  else
    found=$(offered "$host" "$as")
    [ -n "$found" ] ||
      refuse "$host: sshd does not answer" "  fix: is it on, with openssh-server? hvdtrain doctor -H $host"
    found=$(trusted "$host" "${FINGERPRINTS[$host]:-${FINGERPRINTS[$name]:-}}" "$found")
  fi
  umask 077
  append "$KNOWN" "$found"
  say "$host: learned its key, $(fingerprint "$found")"
}

# The keys a host's sshd offers, as lines of known_hosts
offered() {
  local settings address port
  settings=$(ssh -G ${PORT:+-p "$PORT"} -- "$1")
  address=$(awk '$1 == "hostname" { print $2 }' <<<"$settings")
  port=$(awk '$1 == "port" { print $2 }' <<<"$settings")
  ssh-keyscan -T 10 -p "$port" -t ed25519,ecdsa,rsa -- "$address" 2>/dev/null |
    awk -v as="$2" '!/^#/ { $1 = as; print }'
}

fingerprint() { ssh-keygen -l -f - <<<"$1" | awk '{ printf "%s%s %s", (NR > 1 ? ", " : ""), $2, $NF }'; }

# trusted HOST FINGERPRINT LINES: the line with that fingerprint; without one, the best line if the user says yes
trusted() {
  local host=$1 wanted=$2 lines=$3 line answer
  if [ -n "$wanted" ]; then
    while read -r line; do
      [[ $(fingerprint "$line") != "$wanted "* ]] || { printf '%s\n' "$line"; return; }
    done <<<"$lines"
    refuse "$host: no key with the fingerprint $wanted" "  received: $(fingerprint "$lines")" \
      "  fix: ask who runs $host which is right; somebody may be in between"
  fi
  line=$({ grep ' ssh-ed25519 ' <<<"$lines" || head -n 1 <<<"$lines"; } | head -n 1)
  [ -t 0 ] || refuse "$host: its key is not known, and there is no terminal to ask on" \
    "  received: $(fingerprint "$line")" \
    "  fix: compare that with what ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints on $host, then:" \
    "       $0 --fingerprint $host=SHA256:... ${HOSTS[*]}"
  printf 'ssh_setup: %s shows the key %s\n' "$host" "$(fingerprint "$line")" >&2
  printf '  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub on %s must print the same. Does it (yes/no)? ' "$host" >&2
  read -r answer
  [ "$answer" = yes ] || refuse "$host: its key was not confirmed"
  printf '%s\n' "$line"
}

# Lets this machine's key in; asks for the password, if there is one, through ssh-copy-id
let_in() {
  local host=$1 options said
  said=$(on "$host" true 2>&1 </dev/null) && return
  case $said in
    *"IDENTIFICATION HAS CHANGED"* | *"Host key verification failed"*)
      refuse "$host: its key is not the one that is known" \
        "  received: $(grep -i 'offending\|SHA256:' <<<"$said" | tr '\n' ' ')" \
        "  fix: ask who runs $host; if it was installed anew: ssh-keygen -R '$(known_as "$host")', and start again" ;;
    *"Permission denied"*) ;;
    *) refuse "$host: cannot be reached" "  received: $said" "  fix: hvdtrain doctor -H $host" ;;
  esac
  mapfile -t options < <(ssh_options | sed '/^-i$/,$d')
  ssh-copy-id "${options[@]}" -i "$IDENTITY.pub" "$host" >/dev/null </dev/null || refuse "$host: lets nobody in" \
    "  fix: give the right password, or have $IDENTITY.pub added to ~/.ssh/authorized_keys there"
  said=$(on "$host" true 2>&1 </dev/null) || refuse "$host: took the key, but does not let it in" "  received: $said" \
    "  fix: on $host, ~ and ~/.ssh must belong to the user and be writable by nobody else; see sshd's log there"
  say "$host: lets this machine's key in"
}

# The other hosts' side, read by their sh: makes a key if there is none, and prints the public half
OWN_KEY='set -eu; umask 077; mkdir -p ~/.ssh
[ -e ~/.ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N "" -C "$(id -un)@$(uname -n)" -f ~/.ssh/id_ed25519 </dev/null
cat ~/.ssh/id_ed25519.pub'
# add_lines FILE, lines on standard input: adds those that are not there yet, and tells how many
ADD_LINES='set -eu; umask 077
add_lines() {
  touch "$1"; added=0
  [ ! -s "$1" ] || [ -z "$(tail -c 1 "$1")" ] || echo >>"$1"
  while read -r line; do
    case $1 in *authorized_keys) known=${line% *} ;; *) known=$line ;; esac # a key may be there with another comment
    grep -qF -- "$known" "$1" || { printf "%s\n" "$line" >>"$1"; added=$((added + 1)); }
  done
  [ "$added" = 0 ] || echo "added $added lines to $1"
}'

between() {
  local host keys='' known='' own said
  for host in "${HOSTS[@]}"; do
    own=$(on "$host" sh -s <<<"$OWN_KEY" | grep -E '^ssh-ed25519 [A-Za-z0-9+/=]+( |$)' | tail -n 1) ||
      refuse "$host: cannot make a key there (is ssh-keygen installed?)"
    keys+="$(cut -d ' ' -f 1,2 <<<"$own") ${host//[^A-Za-z0-9._@-]/}"$'\n'
    known+=$(lines_for "$(known_as "$host")")$'\n'
  done
  for host in "${HOSTS[@]}"; do
    said=$(on "$host" sh -s <<<"$ADD_LINES
add_lines ~/.ssh/authorized_keys <<'END_OF_LINES'
${keys}END_OF_LINES
add_lines ~/.ssh/known_hosts <<'END_OF_LINES'
${known}END_OF_LINES") || refuse "$host: cannot write ~/.ssh there"
    [ -z "$said" ] || while read -r line; do say "$host: $line"; done <<<"$said"
  done
}

# Every host logs in to every other, all of a host's at once
check_between() {
  local host failed='' came
  for host in "${HOSTS[@]}"; do
    came=$(on "$host" sh -s -- ${PORT:+-p "$PORT"} -- "${HOSTS[@]}" <<'END_OF_SCRIPT'
options=
while [ "$1" != -- ]; do options="$options $1"; shift; done
shift
for other; do
  { ssh $options -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10 -- "$other" true </dev/null ||
    echo "does not reach $other"; } 2>&1 | sed "s/^/  /" &
done
wait
END_OF_SCRIPT
    ) || came="  cannot try"
    [ -z "$(grep -E 'does not reach|cannot try' <<<"$came" || true)" ] || failed+="$host:"$'\n'"$came"$'\n'
  done
  [ -z "$failed" ] || refuse "not every host reaches every other" "$failed" \
    "  fix: hvdtrain doctor -H $(IFS=,; echo "${HOSTS[*]}")"
}

parse "$@"
for tool in ssh ssh-keygen ssh-keyscan ssh-copy-id; do
  command -v "$tool" >/dev/null || refuse "$tool is missing" "  fix: apt-get install openssh-client"
done
make_key
for host in "${HOSTS[@]}"; do learn "$host"; done
for host in "${HOSTS[@]}"; do let_in "$host"; done
if [ -z "$ONE_WAY" ]; then
  between
  check_between
fi
say "done: ${#HOSTS[@]} host(s)${ONE_WAY:+, from here}"
