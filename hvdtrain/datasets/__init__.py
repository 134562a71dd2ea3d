"""Data sets as numpy arrays, for any framework: MNIST from wherever it lies, and the embedded digits."""

from hvdtrain.datasets.mnist import Images, load_mnist

__all__ = ["Images", "load_mnist"]
