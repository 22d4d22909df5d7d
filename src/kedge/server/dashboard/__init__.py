"""The dashboard: a page at `/` and the events that it shows."""
