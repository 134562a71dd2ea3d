"""A split model at work: its stages, their passes, and what is proven of them."""
