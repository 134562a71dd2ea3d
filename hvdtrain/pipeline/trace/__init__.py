"""A model as a chain of segments."""
