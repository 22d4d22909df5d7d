"""Workflows over HTTP: registering them, and runs that the server or a client drives."""
