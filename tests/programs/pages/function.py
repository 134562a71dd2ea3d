"""A function on ranks: docs/cluster.md."""

accuracy = 0.9
# the page
assert accuracies == [0.9] * 4, accuracies  # noqa: F821
