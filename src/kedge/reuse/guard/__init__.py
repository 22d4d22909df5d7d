"""The quality guard: which translations are trusted, by comparing a share of them with dense prefill. No tensors."""
