#!/usr/bin/env bash
# Installs the engine of Google Research Football. See usage() below.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

VERSION=2.10.2
REQUIREMENT="gfootball==$VERSION"
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/seed_rl/football"
# The engine needs all of these to be compiled, and the libraries that they bring to run.
DEBIAN_PACKAGES=(g++ make cmake libopengl-dev libsdl2-image-dev libsdl2-ttf-dev libsdl2-gfx-dev
  libboost-python-dev libboost-thread-dev libboost-filesystem-dev)

usage() {
  cat <<EOT
Usage: ${0##*/}

Installs what Google Research Football needs, and skips what is there already:

  1. Debian packages, by apt-get, which needs root or sudo:
     ${DEBIAN_PACKAGES[*]}
  2. this package with its extra [football], in the virtual environment;
  3. the engine, $REQUIREMENT from PyPI: it is compiled once, in 5 to 13 minutes, and the wheel is
     kept in $CACHE,
     from where other virtual environments of the same Python get it within seconds.

The virtual environment is the one of run_local.sh, and follows the same variables: SEED_RL_VENV,
SEED_RL_PYTHON. Its Python must be of the version that the distribution's Boost.Python is for: 3.11
on Debian 12.
EOT
}

# ---- What there is -------------------------------------------------------------------------------

missing_packages() {
  local package
  for package in "${DEBIAN_PACKAGES[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}\n' "$package" 2>/dev/null |
      grep -qx installed || say "$package"
  done
}

# boost_python_versions: of Python, such as 3.11, that the distribution's Boost.Python is for; a
# line each, and none if nothing is known of it yet.
boost_python_versions() {
  local library digits versions=""
  # Debian's -dev package has such a name for each version of Python that it supports.
  for library in /usr/lib/*/libboost_python3*.so; do
    [[ -e "$library" ]] || continue
    digits="${library##*/libboost_python3}"
    versions+="3.${digits%.so}"$'\n'
  done
  # Where it is not installed yet: the distribution's own Python.
  [[ -n "$versions" ]] || versions="$(apt-cache show --no-all-versions python3 2>/dev/null |
    sed -n 's/^Version: \(3\.[0-9]*\).*/\1/p')"
  [[ -z "$versions" ]] || sort -u <<<"${versions%$'\n'}"
}

# choose_python VERSION…: a new virtual environment is made with a Python that the engine can have.
choose_python() {
  [[ -z "${SEED_RL_PYTHON:-}" && ! -x "$VENV/bin/python" ]] || return 0
  local version candidate
  for version in "$@"; do
    for candidate in "python$version" "/usr/bin/python$version"; do
      if has_known_version "$candidate"; then
        export SEED_RL_PYTHON=$candidate
        return
      fi
    done
  done
}

# require_python VERSION…: of the virtual environment, or of what it would be made with.
require_python() {
  local python="$VENV/bin/python" found
  [[ -x "$python" ]] || python="$(find_python)"
  found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  [[ $# -eq 0 || " $* " == *" $found "* ]] || die "the engine needs Python $*, which is what this" \
    "distribution's Boost.Python is for, and $python is Python $found. Set SEED_RL_PYTHON to a" \
    "Python $1, and SEED_RL_VENV to a new directory for its virtual environment."
}

has_engine() {
  [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -c "
import importlib.metadata, gfootball_engine
assert importlib.metadata.version('gfootball') == '$VERSION'" >/dev/null 2>&1
}

# ---- Debian packages -----------------------------------------------------------------------------

install_packages() {
  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "installing Debian packages needs root, and there is no sudo." \
      "As root: apt-get install --no-install-recommends $*"
    as_root=(sudo)
  fi
  say "Installing Debian packages: $*"
  # In the foreground, for sudo may ask for a password.
  "${as_root[@]}" apt-get update -qq ||
    say "apt-get update failed; going on with the lists of packages that there are."
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes \
    --quiet=2 --no-install-recommends "$@" </dev/null ||
    die "apt-get could not install them; its words above say why."
}

# ---- The engine ----------------------------------------------------------------------------------

# wheel_directory: a wheel fits one distribution, whose libraries it is linked with.
wheel_directory() {
  local distribution
  # shellcheck source=/dev/null
  distribution="$(source /etc/os-release && say "${ID:-linux}-${VERSION_ID:-rolling}")"
  say "$CACHE/$distribution"
}

cached_wheel() {
  local tag wheel
  tag="$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"
  for wheel in "$1/gfootball-$VERSION-$tag-"*"_$(uname -m).whl"; do
    [[ ! -e "$wheel" ]] || say "$wheel"
  done
}

# build_wheel DIRECTORY: compiles the engine in a virtual environment that is thrown away, since the
# build runs the python3 of PATH and needs packages of it that nothing needs afterwards.
build_wheel() {
  local directory=$1 scratch log="$1/build.log"
  mkdir -p "$directory" || die "could not make the directory $directory."
  scratch="$(mktemp -d)"
  # shellcheck disable=SC2064 # this directory is meant, now
  trap "rm -rf -- '$scratch'" EXIT
  say "Compiling the engine: 5 to 13 minutes on two cores. Its output goes to $log"
  run_stoppable compile "$scratch" >"$log" 2>&1 || {
    show_errors "$log" >&2
    die "could not compile the engine. Its output is in $log; run this again to try again."
  }
  # Moved when it is whole, so that an interrupted run leaves no half of a wheel.
  mv "$scratch"/wheel/*.whl "$directory/"
  rm -rf -- "$scratch"
  trap - EXIT
}

# show_errors LOG: the first errors of the compilation; what follows is of pip, at length.
show_errors() {
  local errors
  errors="$(grep -aE -m 2 -A 6 'CMake Error|[Ee]rror:' "$1")" || errors="$(tail -n 15 "$1")"
  say "$errors" | sed 's/^ */  /'
}

# shellcheck disable=SC2329 # run_stoppable calls it
compile() {
  local scratch=$1
  "$VENV/bin/python" -m venv "$scratch/venv"
  export PATH="$scratch/venv/bin:$PATH" VIRTUAL_ENV="$scratch/venv" TMPDIR="$scratch"
  # CMake 4 refuses what the engine says about its version.
  export CMAKE_POLICY_VERSION_MINIMUM="${CMAKE_POLICY_VERSION_MINIMUM:-3.5}"
  local pip=(python -m pip --disable-pip-version-check)
  "${pip[@]}" install setuptools wheel psutil || return
  "${pip[@]}" wheel --verbose --no-build-isolation --no-deps --no-cache-dir \
    --wheel-dir "$scratch/wheel" "$REQUIREMENT"
}

install_engine() {
  local directory wheel
  directory="$(wheel_directory)"
  wheel="$(cached_wheel "$directory")"
  if [[ -z "$wheel" ]]; then
    build_wheel "$directory"
    wheel="$(cached_wheel "$directory")"
  fi
  say "Installing $wheel"
  # Its own list of what it needs has the wrong gym, and pygame and opencv-python, which spoil
  # pygame-ce and opencv-python-headless: the extra [football] has what is right.
  run_stoppable "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --force-reinstall "$wheel" || die "could not install it; pip's words above say why."
}

# try_engine: plays, as an installation that does not is none.
try_engine() {
  "$VENV/bin/python" - <<'EOT' || die "the engine is installed and does not play, see above."
from seed_rl.envs.football import create_environment

env = create_environment(scenario="academy_empty_goal_close")
print("It plays: observations of", env.reset(seed=1)[0].shape, "and", env.action_space.n, "actions.")
env.step(0)
EOT
}

# ---- Main ----------------------------------------------------------------------------------------

announce_plan() {
  say "To be done:"
  [[ $# -eq 0 ]] || say "  - install Debian packages: $*"
  is_installed football || say "  - install this package with its extra [football] into $VENV"
  has_engine || say "  - install the engine, $REQUIREMENT, into $VENV"
  say ""
}

main() {
  case "${1:-}" in
    -h | --help)
      usage
      exit 0
      ;;
    "") ;;
    *) die "takes no arguments, got '$1'; ${0##*/} --help says what it does." ;;
  esac
  [[ -n "$(command -v apt-get)" && -n "$(command -v dpkg-query)" ]] ||
    die "installs Debian packages and finds no apt-get. Elsewhere, install what these bring:" \
      "${DEBIAN_PACKAGES[*]}; then see docs/football.md for the rest."
  local missing versions
  mapfile -t missing < <(missing_packages)
  mapfile -t versions < <(boost_python_versions)
  choose_python "${versions[@]}"
  require_python "${versions[@]}"
  if [[ ${#missing[@]} -eq 0 ]] && has_engine && is_installed football; then
    say "Everything is installed already: $REQUIREMENT in $VENV"
    exit 0
  fi
  announce_plan "${missing[@]}"
  [[ ${#missing[@]} -eq 0 ]] || install_packages "${missing[@]}"
  mapfile -t versions < <(boost_python_versions)
  choose_python "${versions[@]}"
  require_python "${versions[@]}"
  prepare_venv football
  has_engine || install_engine
  try_engine
  say "Now: scripts/run_local.sh football vtrace 2 4"
}

main "$@"
