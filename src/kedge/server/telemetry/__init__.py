"""Metrics, traces and logs of the server."""
