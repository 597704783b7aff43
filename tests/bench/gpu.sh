#!/usr/bin/env bash
# Checks and times this tree on one CUDA GPU, in eight minutes at most: tests/bench/gpu.py says what.
# Installs nothing, needs no network. Without a GPU, or with --dry_run, it runs small on the CPU.
#
#   bash tests/bench/gpu.sh [--dry_run] [--only=SECTION] [OUT]
#
# One JSON object goes to stdout, and to OUT (or $OUT), a file, or a folder for gpu.json in it; the
# file is complete up to the last section that ended.
set -euo pipefail
from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

options=()
out="${OUT:-}"
for arg in "$@"; do
  case "$arg" in
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' tests/bench/gpu.sh
      exit 0
      ;;
    --dry_run | --only=*) options+=("$arg") ;;
    -*)
      echo "gpu: got '$arg': what it knows is --dry_run, --only=SECTION and a path for the JSON." >&2
      exit 2
      ;;
    *) out="$arg" ;;
  esac
done
case "$out" in "" | /*) ;; *) out="$from/$out" ;; esac
if [ -d "$out" ]; then out="$out/gpu.json"; fi

# first_with MODULES: the first of our pythons that has one of these, and all else that is needed.
first_with() {
  local python
  for python in ./.venv/bin/python python3; do
    if "$python" - "$@" <<'PYTHON' 2>/dev/null; then
import sys
from importlib.util import find_spec
needed = ("jax", "flax", "optax", "numpy")
sys.exit(not (all(map(find_spec, needed)) and any(map(find_spec, sys.argv[1:]))))
PYTHON
      echo "$python"
      return
    fi
  done
  return 1
}

python="$(first_with jax_cuda13_plugin jax_cuda12_plugin || first_with jax)" || {
  echo "gpu: neither .venv/bin/python nor python3 has jax, flax and optax:" \
    "install them (bash launch/setup.sh --accelerator=cuda)." >&2
  exit 2
}
echo "gpu: $python" >&2

export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-.92}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}" # errors only
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
exec timeout --kill-after=5 480 "$python" -m tests.bench.gpu --limit_s=465 "${options[@]}" ${out:+--out="$out"}
