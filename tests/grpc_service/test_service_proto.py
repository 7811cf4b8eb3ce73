"""The generated code belongs to the .proto, and runs with every protobuf that is allowed."""

import pathlib
import re
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2

from seed_rl.grpc_service import protocol, service_pb2

FOLDER = pathlib.Path(service_pb2.__file__).parent
NAME = "seed_rl/grpc_service/service.proto"


def _without_json_names(messages) -> None:
    """Some releases of protoc write them out, some do not; they follow from the names."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _without_json_names(message.nested_type)


def test_generated_code_is_not_stale(tmp_path):
    pytest.importorskip("grpc_tools", reason="needs the extra [dev]")
    source = tmp_path / NAME
    source.parent.mkdir(parents=True)
    source.write_bytes((FOLDER / "service.proto").read_bytes())
    out = tmp_path / "out"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(tmp_path)]
    subprocess.run([*command, f"--descriptor_set_out={out}", NAME], check=True)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(committed)
    for file in (fresh, committed):
        _without_json_names(file.message_type)
    assert committed == fresh, "run scripts/generate_proto.sh"


def test_generated_by_the_oldest_protobuf_that_is_allowed():
    text = (FOLDER / "service_pb2.py").read_text()
    assert re.search(r"Protobuf Python Version: 6\.31\.", text)


def test_method_names_are_the_protos():
    (service,) = service_pb2.DESCRIPTOR.services_by_name.values()
    assert service.full_name == protocol.SERVICE
    methods = {m.name: (m.client_streaming, m.server_streaming) for m in service.methods}
    assert methods == {protocol.HANDSHAKE: (False, False), protocol.CALL: (True, True)}


def test_imports_neither_tensorflow_nor_the_rest_of_the_project():
    code = (
        "import sys, seed_rl.grpc_service\n"
        "heavy = ('tensorflow', 'gin', 'gymnasium')\n"
        "names = [n for n in sys.modules if n.partition('.')[0] in heavy"
        " or n.startswith('seed_rl.') and not n.startswith('seed_rl.grpc_service')]\n"
        "assert set(names) <= {'seed_rl.version'}, names"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
