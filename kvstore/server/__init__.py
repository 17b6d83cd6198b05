"""The server process: the store behind gRPC. Started by the supervisor, never by hand."""
