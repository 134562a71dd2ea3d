"""The engines of the PyTorch adapter: one file each, behind one small protocol (`base`)."""
