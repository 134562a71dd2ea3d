"""Values of any nesting, random state and clocks: what everything for PyTorch stands on."""
