"""The engine protocol, the suite that every engine passes, and Kedge's engines."""
