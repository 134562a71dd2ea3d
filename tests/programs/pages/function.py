"""A function on ranks: docs/how-notebook.md."""

import hvdtrain

accuracy = 0.9
# the page
assert accuracies == [0.9] * 4, accuracies
