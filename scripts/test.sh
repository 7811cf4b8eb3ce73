#!/usr/bin/env bash
# Sets up a virtual environment and runs every check and test. See usage() below.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

usage() {
  cat <<EOF
Usage: ${0##*/} [pytest's arguments…]

Runs ruff, shellcheck, mypy (on the package as it is installed) and pytest, for example

    ${0##*/}
    ${0##*/} tests/test_progress.py -k eta

Exits with 0 if all of them passed. The virtual environment is the one of run_local.sh, and follows
the same variables: SEED_RL_VENV, SEED_RL_PYTHON.
EOF
}

# check NAME COMMAND…: runs it; notes in `failed` if it fails, and goes on.
check() {
  local name=$1
  shift
  say "== $name"
  run_stoppable "$@" || failed+=("$name")
}

# check_types: the folders agents/, envs/, … become parts of one package when they are installed
# only, so what is checked is an installed wheel. It is built from a copy, since setuptools would
# take up what an earlier build left behind.
# shellcheck disable=SC2329 # `check` calls it
check_types() {
  local scratch=$1 sources=(seed_rl agents envs grpc_service configs setup.py pyproject.toml
    MANIFEST.in README.md LICENSE)
  mkdir "$scratch/source"
  cp -R "${sources[@]/#/$ROOT/}" "$scratch/source"
  "$VENV/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --wheel-dir "$scratch" "$scratch/source" || return
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$scratch/site" "$scratch"/*.whl || return
  cd "$scratch/site"
  "$VENV/bin/python" -m mypy --config-file "$ROOT/pyproject.toml" \
    --cache-dir "$ROOT/.mypy_cache" --package seed_rl
}

run_pytest() {
  say "== pytest"
  if [[ -t 0 ]]; then
    "$VENV/bin/python" -m pytest "$@" # has the terminal, for its debugger
  else
    run_stoppable "$VENV/bin/python" -m pytest "$@"
  fi
}

main() {
  if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    usage
    exit 0
  fi
  prepare_venv dev atari gym
  cd "$ROOT"
  failed=()
  check "ruff check" "$VENV/bin/python" -m ruff check
  check "ruff format" "$VENV/bin/python" -m ruff format --check
  check shellcheck "$VENV/bin/shellcheck" --external-sources scripts/*.sh tests/scripts/*.sh .ci/run
  scratch="$(mktemp -d)"
  trap 'rm -rf -- "$scratch"' EXIT
  check mypy check_types "$scratch"
  local status=0
  run_pytest "$@" || status=$?
  if [[ ${#failed[@]} -gt 0 ]]; then
    say "FAILED, beside what pytest says:$(printf ' [%s]' "${failed[@]}"), see above."
    [[ $status -ne 0 ]] || status=1
  fi
  exit "$status"
}

main "$@"
