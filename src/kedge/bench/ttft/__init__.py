"""Time to the first token, dense and translated."""
