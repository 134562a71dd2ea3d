"""A rank's batches for `fit` and `evaluate`: of arrays, data sets, and what comes in batches already."""
