"""The wire: batched function calls over bidirectional gRPC streams."""
