"""Criteria: whether a value is shareable, and how wrong its estimates turned out to be."""
