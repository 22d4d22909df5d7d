"""The attention function that Transformers models run with, and the arguments that it honours."""
