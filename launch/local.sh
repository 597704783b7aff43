#!/usr/bin/env bash
# Installs what is needed and runs the main job at debug scale on this machine; the arguments go to
# experiments/appworld_4b.py. It runs from the repository's root, so relative paths start there.
#
#   bash launch/local.sh [--workdir=DIR] [--stages=...] [--config=experiments/appworld_4b.py:paper]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ensure_venv # the arguments are not for the set-up
say "install took $SECONDS s"
if [ "$ACCELERATOR" = cpu ]; then
  export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" # libtpu, where it is installed, would look for a TPU
  keep_memory
fi
cd "$ROOT"
exec "$VENV/bin/python" -m experiments.appworld_4b "$@"
