"""Decisions as pure functions: eviction order, load or recompute, where a fixed prompt ends. No tensors."""
