"""What every engine shares: streams, text from tokens, log-probabilities, the guard at work, saved state."""
