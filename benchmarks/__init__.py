"""Benchmarks of the papers' tables and figures, which need a checkout: `kedge bench NAME` finds them there."""
