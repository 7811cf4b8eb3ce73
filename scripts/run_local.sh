#!/usr/bin/env bash
# Trains on this machine: one learner and its actors. See usage() below.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

usage() {
  cat <<EOF
Usage: ${0##*/} ENV AGENT NUM_ACTORS ENVS_PER_ACTOR [flags…]

Trains AGENT on ENV on this machine, with configs/ENV_AGENT.gin (or ENV.gin, if its agent is AGENT),
for example

    ${0##*/} atari vtrace 2 8

with 2 actor processes that step 8 environments each. Ctrl-C saves a checkpoint and stops.

Flags:
  --logdir=DIR        where checkpoints, TensorBoard's data and logs go; a directory of an earlier
                      run continues it (default: logs/ENV_AGENT_<time> in the checkout)
  --tensorboard       start TensorBoard as well, and say where it is
  --gin_bindings=…    a hyper-parameter, for example --gin_bindings="VTraceAgent.batch_size = 16";
                      may be repeated
  --gin_config=FILE   a further gin file, read after the first; may be repeated
  --seed=N            seed of networks and environments
  -h, --help          this text
Any other flag goes to the learner and to the actors as it is.

Environment variables:
  SEED_RL_VENV        the virtual environment, made on first use (default: .venv in the checkout)
  SEED_RL_PYTHON      the Python to make it with (default: the first on PATH that will do)

Configurations:
$(known_configurations)
EOF
}

known_configurations() {
  local file name agent
  for file in "$ROOT"/configs/*.gin; do
    [[ -e "$file" ]] || continue
    name="$(basename "$file" .gin)"
    agent="$(agent_of_config "$file")"
    if [[ "$name" =~ ^(.+)_((vtrace|r2d2)_.+)$ ]]; then # a variant of an agent's settings
      say "  ${BASH_REMATCH[1]} ${BASH_REMATCH[2]}"
    elif [[ -n "$agent" && "$name" != *"_$agent" ]]; then
      say "  $name $agent"
    else
      say "  ${name%_*} ${name##*_}"
    fi
  done
}

# agent_of_config FILE: the folder of the agent that it names itself, not by what it includes.
agent_of_config() {
  sed -n "s/^experiment\.agent = 'seed_rl\.agents\.\([a-z0-9_]*\)\..*/\1/p" "$1"
}

# find_config ENV AGENT: ENV_AGENT.gin, or ENV.gin where that names this agent.
find_config() {
  local config="$ROOT/configs/$1_$2.gin"
  if [[ ! -e "$config" && -e "$ROOT/configs/$1.gin" &&
    "$(agent_of_config "$ROOT/configs/$1.gin")" == "$2" ]]; then
    config="$ROOT/configs/$1.gin"
  fi
  say "$config"
}

wrong_usage() {
  printf '%s: %s\n\n' "${0##*/}" "$*" >&2
  usage >&2
  exit 2
}

# ---- Arguments -----------------------------------------------------------------------------------

parse_arguments() {
  local argument
  for argument in "$@"; do
    if [[ "$argument" == -h || "$argument" == --help ]]; then
      usage
      exit 0
    fi
  done
  [[ $# -ge 4 ]] || wrong_usage "expected at least 4 arguments, got $#"
  positional=("${@:1:4}")
  env=$1 agent=$2 num_actors=$3 envs_per_actor=$4
  shift 4
  config="$(find_config "$env" "$agent")"
  [[ "$env$agent" != */* && -e "$config" ]] || wrong_usage "there is no configuration" \
    "configs/${env}_$agent.gin for ENV=$env and AGENT=$agent; those that exist are listed below"
  require_positive NUM_ACTORS "$num_actors"
  require_positive ENVS_PER_ACTOR "$envs_per_actor"
  parse_flags "$@"
}

require_positive() {
  [[ "$2" =~ ^[1-9][0-9]{0,5}$ ]] || wrong_usage "$1 must be a positive integer, got '$2'"
}

# parse_flags FLAG…: takes out what is this script's; the rest goes into `flags`. As absl does, it
# takes --name=value, and --name value.
parse_flags() {
  local name
  while [[ $# -gt 0 ]]; do
    [[ "$1" == -* ]] || wrong_usage "unexpected argument '$1'"
    name="${1%%=*}"
    name="${name#-}"
    case "${name#-}" in
      logdir)
        if [[ "$1" == *=* ]]; then
          logdir="${1#*=}"
        else
          logdir="${2:-}"
          shift
        fi
        [[ -n "$logdir" ]] || wrong_usage "--logdir needs a directory"
        ;;
      tensorboard)
        [[ "$1" != *=* ]] || wrong_usage "--tensorboard takes no value"
        tensorboard=yes
        ;;
      run_mode | task | server_address | num_envs | env_batch_size)
        wrong_usage "--${name#-} is set by this script"
        ;;
      *)
        flags+=("$1")
        if [[ "$1" != *=* && $# -gt 1 && "$2" != -* ]]; then
          flags+=("$2")
          shift
        fi
        ;;
    esac
    shift
  done
}

# ---- Directories ---------------------------------------------------------------------------------

# make_logdir: a new one unless one was given; one run at a time may write to it.
make_logdir() {
  local name number=1
  if [[ -z "$logdir" ]]; then
    mkdir -p "$ROOT/logs"
    name="$ROOT/logs/${env}_${agent}_$(date +%Y-%m-%d_%H-%M-%S)"
    logdir=$name
    until mkdir "$logdir" 2>/dev/null; do
      [[ -e "$logdir" ]] || die "could not make the directory $logdir."
      number=$((number + 1))
      logdir="${name}_$number"
    done
  fi
  mkdir -p "$logdir" || die "could not make the directory $logdir."
  logdir="$(cd "$logdir" && pwd -P)"
  command -v flock >/dev/null || return 0
  # The processes of the run inherit the lock: whoever is left of it still holds the directory.
  exec {logdir_lock}>"$logdir/run.lock"
  flock --nonblock "$logdir_lock" || die "another run is writing to $logdir:" \
    "wait for it, stop it, or give another --logdir."
}

# make_socket_directory: private, and short enough for the 107 bytes of a Unix socket's path.
make_socket_directory() {
  local parent="${TMPDIR:-/tmp}"
  [[ ${#parent} -le 80 ]] || parent=/tmp
  socket_directory="$(mktemp -d "$parent/seed_rl.XXXXXX")"
  chmod 700 "$socket_directory"
}

# require_football_engine: it is in no package that pip could have installed just now.
require_football_engine() {
  "$VENV/bin/python" -c 'import importlib.util as u; exit(not u.find_spec("gfootball"))' ||
    die "Google Research Football's engine is not installed in $VENV. Run" \
      "$ROOT/scripts/install_football.sh, which compiles it (5 to 13 minutes, once)."
}

# ---- Processes -----------------------------------------------------------------------------------

# start_logged LOG COMMAND…: both outputs go to the end of LOG.
start_logged() {
  local log=$1
  shift
  start_group "$@" >>"$log" 2>&1
}

start_learner() {
  # Standard output, which shows the progress, stays the terminal's.
  start_group "$VENV/bin/python" -m seed_rl.main --run_mode=learner --logdir="$logdir" \
    "${common_flags[@]}" 2>>"$logdir/learner.log"
  learner=$STARTED
}

start_actor() {
  start_logged "$logdir/actor_$1.log" "$VENV/bin/python" -m seed_rl.main --run_mode=actor \
    --task="$1" "${common_flags[@]}"
  actors[$1]=$STARTED
  started_at[$1]=$SECONDS
}

start_tensorboard() {
  start_logged "$logdir/tensorboard.log" "$VENV/bin/python" -m tensorboard.main \
    --logdir="$logdir" --host=localhost
  tensorboard_pid=$STARTED
}

# announce LINE: prints it so that the learner's live display, which lies at the bottom of a
# terminal, does not overwrite it.
announce() {
  if [[ -t 1 && -n "$learner" ]]; then
    printf '\n%s\n\n\n\n\n\n' "$*" || true
  else
    say "$*"
  fi
}

watch_tensorboard() {
  [[ -n "$tensorboard_pid" ]] || return 0
  local url
  if [[ -z "$tensorboard_said" ]]; then
    url="$(grep -aom1 'http://[^ ]*' "$logdir/tensorboard.log")" || true
    if [[ -n "$url" ]]; then
      announce "TensorBoard: $url"
      tensorboard_said=yes
    fi
  fi
  if ! is_running "$tensorboard_pid"; then
    announce "TensorBoard has ended, see $logdir/tensorboard.log; training goes on."
    tensorboard_pid=""
  fi
}

# watch_actor I: starts it again when it has died, later and later if it dies again and again.
watch_actor() {
  local i=$1 status=0 delay=${delays[$1]:-1}
  if [[ -n "${actors[$i]}" ]]; then
    is_running "${actors[$i]}" && return
    wait "${actors[$i]}" || status=$?
    kill -KILL -- "-${actors[$i]}" 2>/dev/null || true # what it had started
    actors[i]=""
    start_again_at[i]=never
    [[ $status -ne 0 ]] || return 0 # the learner said that training is finished
    ((SECONDS - started_at[i] < 60)) || delay=1
    start_again_at[i]=$((SECONDS + delay))
    delays[i]=$((delay < 16 ? 2 * delay : 30))
    announce "Actor $i died with exit code $status and starts again in $delay s, see" \
      "$logdir/actor_$i.log; its last words: $(last_words "$logdir/actor_$i.log")"
  elif [[ "${start_again_at[$i]}" != never ]] && ((SECONDS >= start_again_at[i])); then
    start_actor "$i"
  fi
}

last_words() {
  tail -n 20 "$1" | grep -av '^[[:space:]]*$' | tail -n 1 | cut -c1-300 || true
}

# supervise: until the learner ends or this script is told to stop.
supervise() {
  local i
  while [[ -z "$stop_signal" ]] && is_running "$learner"; do
    for ((i = 0; i < num_actors; i++)); do
      watch_actor "$i"
    done
    watch_tensorboard
    sleep 0.3 || true
  done
}

# ---- The end -------------------------------------------------------------------------------------

# shellcheck disable=SC2329 # a trap calls it
on_signal() {
  if [[ -n "$stop_signal" ]]; then
    announce "Told to stop twice: ending everything at once."
    exit 130 # by way of clean_up
  fi
  stop_signal=$1
}

# stop_learner: it saves a checkpoint first; sets `status`.
stop_learner() {
  if is_running "$learner"; then
    announce "Stopping: the learner saves a checkpoint …"
    kill -TERM "$learner" 2>/dev/null || true
    await_end "$learner" 9 || killed=yes
    kill -KILL -- "-$learner" 2>/dev/null || true
  fi
  status=0
  wait "$learner" || status=$?
}

# stop_actors SECONDS: asks them to end, waits for all of them together, and kills the rest.
stop_actors() {
  local pid end=$((SECONDS + $1))
  for pid in "${actors[@]}" "$tensorboard_pid"; do
    [[ -z "$pid" ]] || kill -TERM -- "-$pid" 2>/dev/null || true
  done
  for pid in "${actors[@]}" "$tensorboard_pid"; do
    while is_running "$pid" && ((SECONDS < end)); do
      sleep 0.1 || true
    done
  done
  kill_all
  wait || true
}

kill_all() {
  local pid
  for pid in "$learner" "${actors[@]}" "$tensorboard_pid"; do
    [[ -z "$pid" ]] || kill -KILL -- "-$pid" 2>/dev/null || true
  done
}

# clean_up: whatever ended this script, nothing is left behind.
# shellcheck disable=SC2329 # a trap calls it
clean_up() {
  trap '' INT TERM HUP
  kill_all
  [[ -z "$socket_directory" ]] || rm -rf -- "$socket_directory"
}

report() {
  if [[ -n "$killed" ]]; then
    say "The learner did not stop within 9 s and was killed: the newest checkpoint may be older." \
      >&"$errors"
  elif [[ $status -eq 143 && -n "$stop_signal" ]]; then
    say "Stopped before the learner was up: there is no new checkpoint."
  elif [[ $status -eq 137 ]]; then
    {
      say ""
      say "The learner was killed by somebody else, perhaps the system because memory ran out" \
        "(dmesg would say). To go on from its newest checkpoint:"
      say "  $(command_to_go_on)"
    } >&"$errors"
  elif [[ $status -ne 0 ]]; then
    {
      say ""
      say "The learner failed with exit code $status; the end of $logdir/learner.log:"
      tail -n 30 "$logdir/learner.log" | sed 's/^/  /'
    } >&"$errors"
  elif [[ -n "$stop_signal" ]]; then
    say "Stopped. To go on:"
    say "  $(command_to_go_on)"
  else
    say "Training is finished. Its results are in $logdir"
  fi
}

command_to_go_on() {
  # shellcheck disable=SC2086 # not asked for, no argument
  printf '%q ' "$0" "${positional[@]}" --logdir="$logdir" ${tensorboard:+--tensorboard} "${flags[@]}"
}

# ---- Main ----------------------------------------------------------------------------------------

main() {
  env="" agent="" num_actors="" envs_per_actor="" config="" logdir="" tensorboard=""
  positional=() flags=()
  parse_arguments "$@"
  local extra
  extra="$(extra_of_environment "$env")"
  # shellcheck disable=SC2086 # no extra, no argument
  prepare_venv $extra
  [[ "$env" != football* ]] || require_football_engine

  learner="" tensorboard_pid="" tensorboard_said="" stop_signal="" killed="" socket_directory=""
  status=0
  actors=() started_at=() start_again_at=() delays=()
  trap clean_up EXIT
  trap '' PIPE # a reader that goes away must not cost the checkpoint
  trap 'on_signal INT' INT
  trap 'on_signal TERM' TERM
  trap 'on_signal HUP' HUP
  make_logdir
  make_socket_directory
  common_flags=(
    --server_address="unix:$socket_directory/learner"
    --num_envs=$((num_actors * envs_per_actor))
    --env_batch_size="$envs_per_actor"
    --gin_config="$config"
    "${flags[@]}"
  )
  say "Training $agent on $env: $num_actors actors with $envs_per_actor environments each."
  say "Logs and checkpoints: $logdir"
  [[ -z "$tensorboard" ]] || start_tensorboard
  start_learner
  local i
  for ((i = 0; i < num_actors; i++)); do
    start_actor "$i"
  done
  # bash reports on standard error, in its own words and at some later time, whom a signal ended.
  exec {errors}>&2 2>/dev/null
  supervise
  stop_learner
  stop_actors 1
  report
  exit "$status"
}

main "$@"
