"""Data sets as numpy arrays, for any framework; and folders of image files as lists."""

from hvdtrain.datasets.cifar10 import load_cifar10
from hvdtrain.datasets.folder import Folder, load_folder
from hvdtrain.datasets.images import Images, as_rgb, synthetic
from hvdtrain.datasets.mnist import load_digits, load_mnist

__all__ = ["Folder", "Images", "as_rgb", "load_cifar10", "load_digits", "load_folder", "load_mnist", "synthetic"]
