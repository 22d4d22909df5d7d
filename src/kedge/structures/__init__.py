"""Data structures that know nothing of KV: a lazy heap, a multiset of steps, a bounded mapping. No dependencies."""
