"""What training and pipelines alike do with PyTorch's values: nested tensors, generators, a model kept as it was."""
