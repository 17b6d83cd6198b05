"""The process that outlives the server: owns descriptors, passes them to clients, starts and watches the server."""
