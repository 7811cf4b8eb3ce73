#!/bin/sh
# Stands for Python where scripts are tested: notes what is asked of it, and starts the stub main.py.
case "$1 $2" in
  "-m venv")
    echo "venv $3" >>"$STUB_DIR/calls"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    : >"$3/pyvenv.cfg"
    ;;
  "-m pip")
    [ "$3" = install ] || exit 0
    shift 2
    echo "pip begins: $*" >>"$STUB_DIR/calls"
    sleep "${STUB_INSTALL_SECONDS:-0}"
    [ -z "$STUB_INSTALL_FAILS" ] || { echo "no such package"; exit 1; }
    echo "pip ends" >>"$STUB_DIR/calls"
    ;;
  "-m seed_rl.main")
    shift 2
    exec "$STUB_REAL_PYTHON" "$STUB_MAIN" "$@"
    ;;
  "-m tensorboard.main")
    echo "TensorBoard 9.9.9 at http://localhost:12345/ (Press CTRL+C to quit)"
    echo "tensorboard $$" >>"$STUB_DIR/pids"
    exec sleep 1000
    ;;
  *)
    exec "$STUB_REAL_PYTHON" "$@"
    ;;
esac
