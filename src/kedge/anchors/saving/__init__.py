"""Anchor pools and base KV as records that outlive a process."""
