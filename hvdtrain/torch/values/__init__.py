"""The clock of a step, and errors of memory: what everything for PyTorch stands on."""
