"""The wire: batched function calls over bidirectional gRPC streams.

A server binds functions, a client calls them as its methods; nothing here knows of reinforcement
learning or imports TensorFlow.

    server = Server(["unix:/tmp/learner", "localhost:0"])
    server.bind(inference)  # a tf.function with an input_signature
    server.start()

    client = Client("unix:/tmp/learner")
    actions = client.inference(env_ids, observations)
"""

from seed_rl.grpc_service.batching import FunctionStatistics as FunctionStatistics
from seed_rl.grpc_service.client import Client as Client
from seed_rl.grpc_service.client import FunctionInfo as FunctionInfo
from seed_rl.grpc_service.credentials import NO_CREDENTIALS as NO_CREDENTIALS
from seed_rl.grpc_service.credentials import Credentials as Credentials
from seed_rl.grpc_service.credentials import read_token as read_token
from seed_rl.grpc_service.errors import AddressError as AddressError
from seed_rl.grpc_service.errors import AuthenticationError as AuthenticationError
from seed_rl.grpc_service.errors import CallTimeoutError as CallTimeoutError
from seed_rl.grpc_service.errors import CancelledError as CancelledError
from seed_rl.grpc_service.errors import CredentialsError as CredentialsError
from seed_rl.grpc_service.errors import EnvironmentsInUseError as EnvironmentsInUseError
from seed_rl.grpc_service.errors import MessageTooLargeError as MessageTooLargeError
from seed_rl.grpc_service.errors import ProtocolError as ProtocolError
from seed_rl.grpc_service.errors import RemoteFunctionError as RemoteFunctionError
from seed_rl.grpc_service.errors import RpcError as RpcError
from seed_rl.grpc_service.errors import SignatureError as SignatureError
from seed_rl.grpc_service.errors import UnavailableError as UnavailableError
from seed_rl.grpc_service.errors import UnknownFunctionError as UnknownFunctionError
from seed_rl.grpc_service.protocol import (
    DEFAULT_MAX_MESSAGE_BYTES as DEFAULT_MAX_MESSAGE_BYTES,
)
from seed_rl.grpc_service.server import Server as Server
from seed_rl.grpc_service.specs import TensorSpec as TensorSpec
from seed_rl.grpc_service.specs import to_spec as to_spec
