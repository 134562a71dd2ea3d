"""What is proven of a fit before and after its first step."""
