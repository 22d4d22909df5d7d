"""KV tensors: shape, unrotated segments, rotation, paged storage, copies."""
