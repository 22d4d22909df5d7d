"""Loading a Transformers model, checking at load that Kedge serves it right, and running batches through it."""
