# shellcheck shell=bash
# Sourced by setup.sh, local.sh and test.sh: finds a Python, makes the venv, installs into it.
# Defines ROOT and ensure_venv, which sets VENV and ACCELERATOR.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
SUPPORTED="3.14 3.13 3.12 3.11" # newest first: jax 0.12 has wheels for 3.12 to 3.14, jax 0.10 for 3.11
NAME="$(basename "$0" .sh)"

say() { printf '%s: %s\n' "$NAME" "$*"; }
die() {
  printf '%s: %s\n' "$NAME" "$*" >&2
  exit 1
}

# A pyenv shim is on PATH even when it cannot run, so whatever is found is run before it is used.
find_uv() { if uv --version >/dev/null 2>&1; then command -v uv; fi; }

supported() { case " $SUPPORTED " in *" $1 "*) true ;; *) false ;; esac }

# python_version PYTHON: "3.13" if it runs and has what we need, else nothing and a status of 1.
python_version() {
  "$1" -I - 2>/dev/null <<'PYTHON'
import ssl, sqlite3, sys, sysconfig, zlib
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print("%d.%d" % sys.version_info[:2])
PYTHON
}

# candidates SUFFIX: every file that may be a python$SUFFIX ("3.13", or "3" for whatever it is).
candidates() {
  local uv_dir=""
  type -aP "python$1" || true
  printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/bin/python"$1" | sort -rV
  if [ -n "$UV" ]; then
    uv_dir="$("$UV" python dir 2>/dev/null || true)"
    printf '%s\n' "$uv_dir"/cpython-"$1".*/bin/python"$1" | sort -rV
  fi
}

# find_python VERSION: prints a Python of that version which runs, or fails.
find_python() {
  local path
  while IFS= read -r path; do
    case "$path" in "$ROOT"/.venv*) continue ;; esac # our own venvs may be about to be rebuilt
    [ -x "$path" ] || continue
    [ "$(python_version "$path")" = "$1" ] || continue
    # Debian ships Pythons that cannot make a venv; uv does not need ensurepip.
    [ -n "$UV" ] || "$path" -I -c 'import ensurepip, venv' 2>/dev/null || continue
    printf '%s\n' "$path"
    return 0
  done < <(candidates "$1"; candidates 3)
  return 1
}

# newest_python: prints the newest supported version that find_python finds, or fails.
newest_python() {
  local version
  for version in $SUPPORTED; do
    if find_python "$version" >/dev/null; then
      printf '%s\n' "$version"
      return 0
    fi
  done
  return 1
}

found_pythons() {
  local version found="" path
  for version in $SUPPORTED; do
    if find_python "$version" >/dev/null; then found="$found, $version"; fi
  done
  if [ -z "$found" ]; then
    for path in $(candidates 3); do
      version="$(python_version "$path")" && found="$found, $version at $path"
    done
  fi
  printf '%s\n' "${found:+${found#, }}"
}

no_python() {
  local found
  found="$(found_pythons)"
  die "found no working Python $1 that can make a venv (found: ${found:-none}): install one" \
    "(apt install python3.X python3.X-venv, pyenv install 3.X or uv python install 3.X)${2:-}."
}

# detect_accelerator: tpu, cuda, cuda12 or cpu, by what this machine has.
detect_accelerator() {
  local driver
  if compgen -G '/dev/accel[0-9]*' >/dev/null; then
    echo tpu
  elif driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)"; then
    if [ "${driver%%.*}" -ge 580 ] 2>/dev/null; then echo cuda; else echo cuda12; fi
  elif compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
    echo tpu # v5p and later; a GPU machine may have vfio devices too, hence after nvidia-smi
  else
    echo cpu
  fi
}

# choose_venv [VERSION]: sets VENV, VERSION and PYTHON (empty where the venv is there and runs).
choose_venv() {
  local want="$1" default
  default="$(python_version "$ROOT/.venv/bin/python" || true)"
  VERSION="${want:-$default}"
  PYTHON=""
  VENV="$ROOT/.venv"
  if [ -n "$default" ] && [ "$VERSION" = "$default" ]; then
    supported "$default" || die ".venv is Python $default and one of $SUPPORTED is needed:" \
      "move .venv away, or ask for another with --python=3.X."
    return
  fi
  if [ -n "$want" ] && [ "$(python_version "$ROOT/.venv-$want/bin/python")" = "$want" ]; then
    VENV="$ROOT/.venv-$want"
    return
  fi
  UV="$(find_uv)"
  [ -n "$want" ] || VERSION="$(newest_python)" || no_python "of $SUPPORTED"
  PYTHON="$(find_python "$VERSION")" || no_python "$VERSION" ", or leave --python out"
  if [ -n "$default" ] || [ "$VERSION" != "$(newest_python)" ]; then
    VENV="$ROOT/.venv-$VERSION"
  fi
}

# The stamp holds what was installed from what; it is written last, so half an install has none.
fingerprint() {
  { cat "$ROOT/requirements.txt" "$ROOT/setup.py"; echo "$ROOT"; } |
    { sha256sum 2>/dev/null || shasum -a 256; } | cut -d ' ' -f 1
}

install() { # install EXTRAS, e.g. "dev,tpu"
  local target="."
  [ -z "$1" ] || target=".[$1]"
  cd "$ROOT" || return
  if [ -n "$UV" ]; then
    "$UV" pip install --quiet --python "$VENV/bin/python" --editable "$target"
    return
  fi
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    "$VENV/bin/python" -m ensurepip >/dev/null
  fi
  "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
    --use-pep517 --editable "$target"
}

# ensure_venv [--python=3.X] [--dev] [--accelerator=cpu|tpu|cuda|cuda12]
ensure_venv() {
  local want="" wanted="" extras extra arg stamp old_hash="" old_extras="" start
  ACCELERATOR=""
  for arg in "$@"; do
    case "$arg" in
      --python=*) want="${arg#*=}" ;;
      --dev) wanted="dev" ;;
      --accelerator=*) ACCELERATOR="${arg#*=}" ;;
      *) die "got '$arg': what it knows is --python=3.X, --dev, --accelerator=cpu|tpu|cuda|cuda12." ;;
    esac
  done
  if [ -n "$want" ] && ! supported "$want"; then
    die "got --python=$want and one of $SUPPORTED is needed: ask for that, or leave --python out."
  fi
  [ -n "$ACCELERATOR" ] || ACCELERATOR="$(detect_accelerator)"
  case "$ACCELERATOR" in
    cpu) ;;
    tpu | cuda | cuda12) wanted="$wanted $ACCELERATOR" ;;
    *) die "got --accelerator=$ACCELERATOR and cpu, tpu, cuda or cuda12 is needed." ;;
  esac

  # One set-up at a time in one checkout; the lock goes with this process.
  exec 9<"$ROOT/launch/common.sh"
  if command -v flock >/dev/null && ! flock -n 9; then
    say "another set-up is at work here, waiting for it"
    flock 9
  fi

  start=$SECONDS
  choose_venv "$want"
  stamp="$VENV/.harness_s_jax"
  if [ -z "$PYTHON" ] && [ -f "$stamp" ]; then
    { read -r old_hash && read -r old_extras; } <"$stamp" || true
  fi
  extras="$old_extras"
  for extra in $wanted; do
    case " $extras " in *" $extra "*) ;; *) extras="${extras:+$extras }$extra" ;; esac
  done
  if [ "$old_hash" = "$(fingerprint)" ] && [ "$extras" = "$old_extras" ]; then
    say "${VENV##*/} (Python $VERSION) is up to date"
  else
    UV="$(find_uv)"
    if [ -n "$PYTHON" ]; then
      [ ! -e "$VENV" ] || say "${VENV##*/} does not run Python $VERSION, making it anew"
      rm -rf "$VENV"
      if [ -n "$UV" ]; then
        "$UV" venv --quiet --python "$PYTHON" "$VENV"
      else
        "$PYTHON" -m venv "$VENV"
      fi
      say "made ${VENV##*/} with $PYTHON ($((SECONDS - start)) s)"
    fi
    rm -f "$stamp"
    start=$SECONDS
    say "installing harness_s_jax${extras:+[${extras// /,}]} with ${UV:-pip} into ${VENV##*/} (Python $VERSION)"
    install "${extras// /,}"
    printf '%s\n%s\n' "$(fingerprint)" "$extras" >"$stamp"
    say "installed ($((SECONDS - start)) s)"
  fi
  exec 9<&-
}

# keep_memory: on a CPU, XLA takes the memory of a program anew at each call. glibc then keeps what
# is freed, and no page is cleared twice: a tenth of forward and backward in tests/bench/model.py.
keep_memory() {
  export MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1000000000000
}
