"""Runs one of Horovod's examples: in this rank, or in one process that stands for all of them.

usage: example.py HOW SIZE FOLDER FILE [ARGUMENT ...]

HOW is `ranks` (Horovod), `one` (one process whose batches are those of all ranks together), or `unaveraged` (rank 0's
share of the samples alone). In each, the samples are dealt in turn, in the order they have; numbers are of 64 bits;
nothing is dropped out, normed by a batch or changed at random, which ranks would do differently. The weights in the
end go to FOLDER/HOW.RANK.npz.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nobody
import numpy as np

Weights = list[np.ndarray]
trained: list[Callable[[], Weights]] = []  # what gives the weights of each optimizer, first the example's own


def unchanged(value: Any, *_: Any, **__: Any) -> Any:
    return value


def with_torch(rank: int, size: int, together: bool) -> None:
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler
    from torchvision import transforms

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[misc]
    torch.nn.functional.dropout = torch.nn.functional.dropout2d = unchanged
    transforms.RandomResizedCrop.get_params = staticmethod(lambda image, *_: (0, 0, image.height, image.width))
    transforms.RandomHorizontalFlip.forward = lambda self, image: image
    made, sampler, loader = torch.optim.SGD.__init__, DistributedSampler.__init__, DataLoader.__init__
    drawn, random = np.random.default_rng(2), torch.Tensor.random_

    def dealt(shape: tuple[int, ...]) -> np.ndarray:
        """One draw for all ranks; this one's rows."""
        return drawn.normal(size=(size * shape[0], *shape[1:]))[rows(rank, size, together)]

    def sgd(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        made(self, params, *args, **kwargs)
        trained.append(lambda: [p.detach().numpy() for group in self.param_groups for p in group["params"]])

    def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.group_norm(x, 1, self.weight, self.bias)  # each sample by itself

    def sampled(self: Any, dataset: Any, num_replicas: int, rank: int) -> None:
        sampler(self, dataset, *((1, 0) if together else (num_replicas, rank)))

    def loaded(self: Any, dataset: Any, batch_size: int, **kwargs: Any) -> None:
        loader(self, dataset, batch_size * (size if together else 1), **kwargs)

    def labelled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.ndim:  # PyTorch's own seeds
            return random(self, *args, **kwargs)
        return torch.from_numpy(1000 * np.abs(dealt(tuple(self.shape)))).to(self.dtype)

    torch.nn.BatchNorm2d.forward = normed  # type: ignore[method-assign, assignment]
    torch.optim.SGD.__init__ = sgd  # type: ignore[method-assign]
    DistributedSampler.__init__ = sampled  # type: ignore[method-assign, assignment]
    DataLoader.__init__ = loaded  # type: ignore[method-assign, assignment]
    torch.randn = lambda *shape: torch.from_numpy(dealt(shape))
    torch.Tensor.random_ = labelled  # type: ignore[method-assign, assignment]


def with_tensorflow(rank: int, size: int, together: bool) -> None:
    import tensorflow as tf
    from tensorflow import keras

    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    keras.layers.Dropout.call = lambda self, inputs, training=None: inputs
    keras.layers.BatchNormalization.call = lambda self, inputs, training=None, mask=None: (
        inputs * self.gamma + self.beta
    )
    build, fit, batch = keras.optimizers.Optimizer.build, keras.Model.fit, tf.data.Dataset.batch
    drawn, all_ranks = np.random.default_rng(2), size if together else 1
    generator = keras.preprocessing.image.ImageDataGenerator
    flow, files, mine = generator.flow, generator.flow_from_directory, rows(rank, size, together)

    def built(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        trained.append(lambda: [variable.numpy() for variable in variables])
        return build(self, variables, *args, **kwargs)

    def fitted(self: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        if batch_size is not None:
            kwargs["batch_size"] = batch_size * all_ranks
        return fit(self, *args, **kwargs, shuffle=False)

    def pictures(self: Any, *args: Any, batch_size: int, **kwargs: Any) -> Any:
        found = files(self, *args, batch_size=batch_size * all_ranks, shuffle=False, **kwargs)
        for name in ("filenames", "classes", "_filepaths"):
            setattr(found, name, getattr(found, name)[mine])
        found.n = found.samples = len(found.filenames)
        found.index_generator = found._flow_index()
        return found

    def digits(path: str = "") -> Any:
        data = dict(np.load(os.environ["DIGITS"]))
        return (data["x_train"][mine], data["y_train"][mine]), (data["x_test"], data["y_test"])

    def uniform(shape: Any, minval: int = 0, maxval: int = 1, dtype: Any = tf.float32) -> Any:
        values = drawn.uniform(minval, maxval, (size * shape[0], *shape[1:]))[mine]
        return tf.constant(values.astype(dtype.as_numpy_dtype))

    keras.optimizers.Optimizer.build = built
    keras.Model.fit = fitted
    generator.apply_transform = lambda self, image, transform: image
    generator.flow = lambda self, *arrays, batch_size: flow(
        self, *arrays, batch_size=batch_size * all_ranks, shuffle=False
    )
    generator.flow_from_directory = pictures
    tf.data.Dataset.shuffle = unchanged
    tf.data.Dataset.batch = lambda self, n, *args, **kwargs: batch(self, n * all_ranks, *args, **kwargs)
    tf.random.uniform = uniform
    keras.datasets.mnist.load_data = digits


def rows(rank: int, size: int, together: bool) -> slice:
    return slice(None) if together else slice(rank, None, size)


def main(how: str, size: int, folder: Path, file: Path, arguments: list[str]) -> None:
    if how != "ranks":
        nobody.install(size, how == "one")
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    text = file.read_text(encoding="utf-8")
    settings = with_torch if "import torch" in text else with_tensorflow
    settings(rank, size, how == "one")
    sys.argv = [file.name, *arguments]
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")
    np.savez(folder / f"{how}.{rank}.npz", *trained[0]())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
