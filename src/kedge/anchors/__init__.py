"""Base KV and anchors: how the KV of a value differs from one context to another."""
