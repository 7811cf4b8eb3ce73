# What the scripts share: processes that end when they are told to, and the virtual environment.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)"
VENV="${SEED_RL_VENV:-$ROOT/.venv}"
# TensorFlow has builds for these versions of Python.
PYTHON_VERSIONS="3.10 3.11 3.12 3.13"

say() {
  printf '%s\n' "$*" || true # a terminal that went away is no reason to stop half-way
}

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# extra_of_environment ENV: the extra of setup.py that brings the packages of an environment.
extra_of_environment() {
  case "$1" in
    atari | envpool | minatar | mujoco) say "$1" ;;
    football*) say football ;;
    *) ;; # gymnasium, which `gym` takes, comes with the package itself
  esac
}

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  die "needs bash 4.4 or newer, this is $BASH_VERSION."
fi

# ---- Processes -----------------------------------------------------------------------------------

# start_group COMMAND…: starts it in the background, in a process group of its own, so that Ctrl-C
# reaches this script alone, and so that all that it starts can be ended with it. Sets STARTED.
start_group() {
  set -m
  "$@" </dev/null &
  STARTED=$!
  set +m
}

# is_running PID: of a process that start_group started.
is_running() {
  local newline=$'\n'
  [[ -n "$1" && "$newline$(jobs -rp; jobs -sp)$newline" == *"$newline$1$newline"* ]]
}

# await_end PID SECONDS: waits until it has ended; fails if it has not by then.
await_end() {
  local end=$((SECONDS + $2))
  while is_running "$1"; do
    ((SECONDS < end)) || return 1
    sleep 0.1 || true
  done
}

# end_group PID SIGNAL SECONDS: asks a whole group to end, and kills it if it does not.
end_group() {
  kill "-$2" -- "-$1" 2>/dev/null || true
  await_end "$1" "$3" || true
  kill -KILL -- "-$1" 2>/dev/null || true
}

# run_stoppable COMMAND…: runs it to its end; if this script is told to end, so is the command.
run_stoppable() {
  local status=0 group
  start_group "$@"
  group=$STARTED
  # shellcheck disable=SC2064 # this process is meant, now
  trap "end_group $group INT 5; exit 130" INT
  # shellcheck disable=SC2064
  trap "end_group $group INT 5; exit 143" TERM HUP
  wait "$group" || status=$?
  trap - INT TERM HUP
  return "$status"
}

# ---- The virtual environment ---------------------------------------------------------------------

# has_known_version PYTHON: whether it runs and is a version that TensorFlow has builds for.
has_known_version() {
  local version
  version="$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || return 1
  [[ " $PYTHON_VERSIONS " == *" $version "* ]]
}

# find_python: prints the interpreter to make the virtual environment with.
find_python() {
  local candidate
  if [[ -n "${SEED_RL_PYTHON:-}" ]]; then
    has_known_version "$SEED_RL_PYTHON" || die "SEED_RL_PYTHON=$SEED_RL_PYTHON is not a Python of" \
      "version ${PYTHON_VERSIONS// /, }, which is what TensorFlow has builds for."
    say "$SEED_RL_PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if has_known_version "$candidate"; then
      say "$candidate"
      return
    fi
  done
  die "needs Python ${PYTHON_VERSIONS// /, } and finds none on PATH. Install one (Debian, Ubuntu:" \
    "apt-get install python3 python3-venv), or set SEED_RL_PYTHON to where it is."
}

# make_venv: makes the virtual environment, or mends one whose making was interrupted.
make_venv() {
  local python version
  if [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    has_known_version "$VENV/bin/python" || die "the virtual environment $VENV is not of Python" \
      "${PYTHON_VERSIONS// /, }: delete it, or set SEED_RL_VENV to another directory."
    return
  fi
  python="$(find_python)"
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    die "$python has no venv module. On Debian and Ubuntu: apt-get install python$version-venv"
  fi
  say "Making a virtual environment in $VENV with $("$python" --version) …"
  run_stoppable "$python" -m venv "$VENV" || die "could not make the virtual environment $VENV:" \
    "delete it and try again."
}

# fingerprint: changes whenever what is installed has to.
fingerprint() {
  {
    say "$ROOT"
    cat "$ROOT/setup.py" "$ROOT/pyproject.toml"
  } | cksum
}

# stamps_of EXTRA…: prints the files that say of which fingerprint the installed package is.
stamps_of() {
  local extra
  say "$VENV/seed_rl.installed"
  for extra in "$@"; do
    say "$VENV/seed_rl.installed.$extra"
  done
}

# is_installed EXTRA…: whether the package is, with these, from this checkout as it is now.
is_installed() {
  local stamp now
  now="$(fingerprint)"
  while read -r stamp; do
    [[ -e "$stamp" && "$(<"$stamp")" == "$now" ]] || return 1
  done < <(stamps_of "$@")
}

# install_package EXTRA…: installs the package so that it runs from this checkout, unless it is.
install_package() {
  local extras="$*" stamp stamps now verbosity=() duration=""
  is_installed "$@" && return
  now="$(fingerprint)"
  mapfile -t stamps < <(stamps_of "$@")
  [[ -e "${stamps[0]}" ]] || duration=" The first time takes some minutes: TensorFlow alone is 600 MB."
  say "Installing the package${extras:+ with what $extras needs} into $VENV …$duration"
  # The first time, in a terminal, pip shows what it downloads.
  [[ -t 1 && ! -e "${stamps[0]}" ]] || verbosity=(--quiet)
  run_stoppable "$VENV/bin/python" -m pip install --disable-pip-version-check "${verbosity[@]}" \
    --editable "$ROOT${extras:+[${extras// /,}]}" ||
    die "could not install the package; pip's words above say why. Run this again to go on."
  for stamp in "${stamps[@]}"; do
    say "$now" >"$stamp"
  done
}

# prepare_venv EXTRA…: makes and fills the virtual environment where that is still to be done. Runs
# that start side by side take turns: on the virtual environment, and on the checkout, in which
# pip writes the metadata.
prepare_venv() {
  mkdir -p "$VENV" || die "could not make the directory $VENV."
  local contents
  # Listed before it is looked whether a run that started beside this one has made its lock.
  contents="$(ls -A "$VENV")"
  if [[ -n "$contents" && ! -e "$VENV/pyvenv.cfg" && ! -e "$VENV/seed_rl.lock" ]]; then
    die "$VENV is neither empty nor a virtual environment: set SEED_RL_VENV to another directory."
  fi
  VENV="$(cd "$VENV" && pwd -P)"
  exec {venv_lock}>"$VENV/seed_rl.lock" {checkout_lock}<"$ROOT/setup.py"
  take_turn "$venv_lock"
  take_turn "$checkout_lock"
  make_venv
  install_package "$@"
  exec {venv_lock}>&- {checkout_lock}<&-
}

take_turn() {
  command -v flock >/dev/null || return 0 # not on macOS
  flock --nonblock "$1" && return
  say "Waiting for another run to set up $VENV …"
  run_stoppable flock "$1"
}
