"""The disk tier of the embedded engine: files of KV blocks, and the thread that writes and reads them."""
