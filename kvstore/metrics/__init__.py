"""Metrics for Prometheus, and liveness and readiness, over plain HTTP. Read-only."""
