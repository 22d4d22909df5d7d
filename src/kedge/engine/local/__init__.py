"""The embedded engine: PyTorch and Transformers."""
