"""For all tests."""

import os

# Some tests fork after others have used gRPC, whose handlers of forks would write into the child's
# standard error. Read when gRPC is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
