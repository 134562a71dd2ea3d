"""A `fit` whose ranks come and go: what cannot, how it goes on, and what a new rank gets of it."""
