"""What is proven of a training, and what is said when it is not right."""
