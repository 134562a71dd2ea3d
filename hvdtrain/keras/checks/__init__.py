"""What is proven of a fit: before it starts, after its first step, and around each."""
