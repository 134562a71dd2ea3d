"""Random streams, clocks and errors of memory: what everything for PyTorch stands on."""
