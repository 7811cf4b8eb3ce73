"""What goes wrong on the wire, one class a cause."""


class RpcError(RuntimeError):
    """The base of every error of this package."""


class AddressError(RpcError):
    """An address cannot be understood, listened on, or used without encryption."""


class CredentialsError(RpcError):
    """Certificates or the token of this process cannot be used."""


class AuthenticationError(RpcError):
    """The server does not believe this client, or this client does not believe the server."""


class UnavailableError(RpcError):
    """No server answers: it is not up yet, has died, or is shutting down."""


class CancelledError(RpcError):
    """The call was given up because the server or this client shut down while it waited."""


class CallTimeoutError(RpcError):
    """The answer took longer than the client's `call_timeout`."""


class UnknownFunctionError(RpcError, AttributeError):
    """The server has no function of that name; an AttributeError, so that `hasattr` works."""


class SignatureError(RpcError):
    """Values (or specs) do not fit a function's signature: structure, dtype, shape or rows."""


class EnvironmentsInUseError(RpcError):
    """Another client, which is alive as far as the server knows, has the environments."""


class ProtocolError(RpcError):
    """The other side speaks another protocol version, or not this protocol at all."""


class MessageTooLargeError(RpcError):
    """A request or an answer exceeds the message limit of one of the two sides."""


class RemoteFunctionError(RpcError):
    """The bound function raised on the server.

    Attributes:
      exception_type: class name of what was raised there, for example "ValueError".
    """

    def __init__(self, message: str, exception_type: str = ""):
        super().__init__(message)
        self.exception_type = exception_type
