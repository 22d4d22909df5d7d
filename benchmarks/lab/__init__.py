"""The papers' experiments on answers: dense prefill and other methods on the same questions."""
