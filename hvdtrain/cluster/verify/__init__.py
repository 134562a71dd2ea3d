"""A toy that is trained on a cluster, and compared with one process."""
