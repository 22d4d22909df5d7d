"""Workflows over HTTP: registering them, and runs that the server drives."""
