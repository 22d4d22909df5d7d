"""HTTP without engines: bodies and their limits, media types, hosts, error answers and event streams."""
