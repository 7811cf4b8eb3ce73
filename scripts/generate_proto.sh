#!/bin/bash
# Generates grpc_service/service_pb2.py from service.proto, in a throw-away virtual environment.
#
# Generated code runs with the protobuf release that its generator bundles and with later ones. This
# grpcio-tools bundles 6.31.1, the oldest protobuf that TensorFlow allows here.
set -euo pipefail
GRPCIO_TOOLS_VERSION=1.75.1

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet "grpcio-tools==$GRPCIO_TOOLS_VERSION"
# The full path in the package is the name under which protobuf registers the file: another
# library's service.proto must not clash with it.
mkdir -p "$scratch/in/seed_rl/grpc_service" "$scratch/out"
cp grpc_service/service.proto "$scratch/in/seed_rl/grpc_service/"
"$scratch/venv/bin/python" -m grpc_tools.protoc -I "$scratch/in" --python_out="$scratch/out" \
    seed_rl/grpc_service/service.proto
cp "$scratch/out/seed_rl/grpc_service/service_pb2.py" grpc_service/service_pb2.py
