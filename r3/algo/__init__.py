"""Algorithms as pure functions: advantages, losses, packing."""
