#!/usr/bin/env bash
# Installs what is needed, then lints (on the default Python, without further arguments) and tests.
#
#   bash launch/test.sh [--python=3.X] [--slow | --subset] [pytest args...]
#
# --slow adds the tests marked slow; --subset runs only those marked stack, in 4 minutes at most.
# The tests run on the CPU, without network and without API keys.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python_arg=""
select="not slow"
for arg in "$@"; do
  shift
  case "$arg" in
    -h | --help)
      sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --python=*) python_arg="$arg" ;;
    --slow) select="" ;;
    --subset) select="stack and not slow" ;;
    *) set -- "$@" "$arg" ;; # what is left is pytest's
  esac
done

ensure_venv --dev --accelerator=cpu ${python_arg:+"$python_arg"}
cd "$ROOT"
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline
export NO_GCE_CHECK=true TPU_SKIP_MDS_QUERY=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset OPENAI_API_KEY ANTHROPIC_API_KEY
python="$VENV/bin/python"

failed=""
check() { # check NAME COMMAND...: runs it, notes a failure, goes on
  local name="$1" start=$SECONDS
  shift
  "$@" || failed="$failed, $name"
  say "$name took $((SECONDS - start)) s"
}

if [ $# -eq 0 ] && [ "$VENV" = "$ROOT/.venv" ] && [ "$select" != "stack and not slow" ]; then
  check "ruff check" "$python" -m ruff check .
  check "ruff format" "$python" -m ruff format --check --quiet .
  check pyright "$python" -m pyright -p .config/pyrightconfig.json --pythonpath "$python"
fi

start=$SECONDS
status=0
"$python" -m pytest ${select:+-m "$select"} "$@" || status=$?
say "pytest took $((SECONDS - start)) s on Python $VERSION"
if [ "$select" = "stack and not slow" ] && [ $((SECONDS - start)) -gt 240 ]; then
  say "the subset should take 240 s at most: take the mark 'stack' off the longest tests"
fi
[ -z "$failed" ] || die "failed:${failed#,}; pytest's exit code was $status."
exit "$status"
