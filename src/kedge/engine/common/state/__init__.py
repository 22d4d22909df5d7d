"""Snapshots of what an engine has learned, on disk: files, folder, damage and recovery."""
