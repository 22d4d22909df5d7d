"""Criteria of whether a value is shareable."""
