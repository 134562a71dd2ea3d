#!/usr/bin/env bash
# Builds the documentation of docs/ into build/docs; a warning (a link to nothing, a docstring that cannot be read) is an error.
#   scripts/docs.sh -E   what sphinx-build takes: here everything anew
HVDTRAIN_SETUP=dev . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
sphinx-build -q -n -W --keep-going "$@" docs build/docs
say "build/docs/index.html"
