#!/usr/bin/env bash
# Makes .venv for the newest suitable Python (or .venv-3.X for another one that is asked for) and
# installs this package into it. Running it again costs nothing unless the requirements changed.
#
#   bash launch/setup.sh [--python=3.X] [--dev] [--accelerator=cpu|tpu|cuda|cuda12]
#
# --dev adds what the tests need. Without --accelerator it installs what this machine has.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case "${1:-}" in -h | --help)
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
  ;;
esac
ensure_venv "$@"
