"""What every engine shares: streams, validation of requests, text from tokens, log-probabilities."""
