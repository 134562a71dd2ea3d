#!/usr/bin/env bash
# The main job: sets everything up (once), then trains Keras MNIST on 2 ranks of this machine.
# Arguments go to the program: scripts/train.sh --epochs 24 --data mnist      Ranks: NP=4 scripts/train.sh
case ${1:-} in -h | --help) sed -n '2,$s/^# \{0,1\}//p' "$0"; exit ;; esac
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec horovodrun --gloo -np "${NP:-2}" python -m hvdtrain.keras_mnist "$@"
