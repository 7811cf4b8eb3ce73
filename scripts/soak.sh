#!/usr/bin/env bash
# Trains for an hour while actors and the learner are killed, and checks that nothing is lost but
# what docs/reliability.md says. Flags: --minutes=60 --actors=4 --envs_per_actor=4 --directory=DIR
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

prepare_venv dev
exec "$VENV/bin/python" "$ROOT/scripts/soak.py" "$@"
