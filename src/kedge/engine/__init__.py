"""The contract of an engine, and Kedge's engines."""
