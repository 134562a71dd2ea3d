"""State that makes replicas, what a batch weighs, and what is proven of a fit."""
