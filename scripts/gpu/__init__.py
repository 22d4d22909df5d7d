"""The checks that need a GPU; see `scripts/gpu_check.sh`."""
