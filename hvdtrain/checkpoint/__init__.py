"""Checkpoints: written, found again, and read."""
