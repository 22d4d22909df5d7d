"""What the quality guard catches and what it costs: injected faults, clean traffic, and throughput beside no guard."""
