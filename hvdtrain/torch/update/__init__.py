"""One update of the weights: what a batch counts, backward passes, precision, clipping, the step."""
