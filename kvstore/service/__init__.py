"""The gRPC services: from protobuf to the store and back."""
