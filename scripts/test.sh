#!/usr/bin/env bash
# Sets everything up (once), then checks the sources and runs the tests.
#   scripts/test.sh --quick             tests/unit: what starts no process
#   scripts/test.sh --smoke             the first promises on 2 real ranks, in a minute: tests/ranks/test_smoke.py
#   scripts/test.sh tests/ranks -x      what pytest is given, without the checks of the sources
#   scripts/test.sh --coverage          which lines run, in ranks and programs, too; fails below 90 %
# Three files at a time: tests of ranks wait as long as they work. -n 0 for one after the other, in one process.
case ${1:-} in -h | --help) sed -n '2,$s/^# \{0,1\}//p' "$0"; exit ;; esac
# Images of Docker set it: each of some thousand ranks would compile PyTorch's sources once more, half of all the time.
unset PYTHONDONTWRITEBYTECODE
case ${1:-} in --smoke) HVDTRAIN_SETUP=test ;; *) HVDTRAIN_SETUP=dev ;; esac
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
started=$SECONDS
trap 'say "tested in $((SECONDS - started)) s"' EXIT
if [ "${1:-}" = --smoke ]; then
  python -m pytest -q --durations=6 tests/ranks/test_smoke.py "${@:2}"
  exit
fi
test_packages
if [ "${1:-}" = --quick ]; then
  set -- -q tests/unit "${@:2}"
elif [ "${1:-}" = --coverage ]; then
  coverage erase
  export COVERAGE_PROCESS_START=$PWD/setup.cfg COVERAGE_FILE=$PWD/.coverage
  failed=0
  coverage run -m pytest -n 3 --dist loadfile "${@:2}" || failed=$?
  coverage combine -q
  coverage report --skip-covered --fail-under=90
  exit $failed
elif [ $# = 0 ]; then
  scripts/check.sh --lint
fi
python -m pytest -n 3 --dist loadfile "$@"
