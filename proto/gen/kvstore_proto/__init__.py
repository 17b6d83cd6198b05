"""The API of the service: generated protobuf and gRPC code (`kvstore_proto.v1`), and the version of the protocol."""

PROTOCOL_VERSION = 1
