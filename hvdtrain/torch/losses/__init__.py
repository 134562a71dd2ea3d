"""What a loss divides by, and whether samples meet in it."""
