"""Estimators: how the offsets of a value are blended from those of its anchors."""
