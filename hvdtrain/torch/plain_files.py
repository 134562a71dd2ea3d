"""What can be read again without running code: training state and what users keep, as numbers, text and tensors."""

from __future__ import annotations

import copy
import io
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.serialization import get_crc32_options, set_crc32_options

from hvdtrain.checkpoint.parts import ExtraPart
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.engines.buffers import once

_SCALARS = (bool, int, float, str)
_ARRAY, _NUMBER = "numpy.ndarray", "numpy.generic"  # the key of the dict that stands for one
_TOO_WIDE = ("float96", "float128", "longdouble", "complex192", "complex256", "clongdouble")  # for a tensor


class TorchExtra(ExtraPart):
    """`extra.pt`: objects of the user's own."""

    def write(self, file: StateFile) -> None:
        write(self.states(), file, "extra")

    def load(self, path: Path) -> None:
        self.restore(revived(read(path)))

    def put_back(self, value: Any, saved: Any) -> Any:
        if not isinstance(value, (Tensor, np.ndarray)):
            return super().put_back(value, _like(value, saved))
        if value.shape != saved.shape:
            raise ValueError(f"shape {tuple(saved.shape)} in the checkpoint, {tuple(value.shape)} here")
        with torch.no_grad():
            if isinstance(value, np.ndarray):
                value[...] = np.asarray(saved)
            else:
                place = once(value)
                place.copy_(torch.as_tensor(saved)[tuple(slice(size) for size in place.shape)])
        return value


def _like(example: Any, saved: Any) -> Any:
    """Converts dicts to the kind that `example` has (such as `Counter`), and tensors of older files to arrays."""
    if isinstance(example, np.ndarray) and isinstance(saved, Tensor):
        return saved.numpy()
    if isinstance(saved, dict) and isinstance(example, Mapping):
        items = {key: _like(example.get(key), value) for key, value in saved.items()}
        if not isinstance(example, dict) or type(example) is dict:
            return items
        of_its_kind = copy.copy(example)
        of_its_kind.clear()
        of_its_kind.update(items)
        return of_its_kind
    if type(saved) in (list, tuple) and isinstance(example, (list, tuple)) and len(saved) == len(example):
        return type(saved)(map(_like, example, saved))
    return saved


_writing = threading.local()


def _as_on_cpu(storage: Any) -> str | None:
    """Returns where a storage is to be loaded: on the CPU, so that a machine without a GPU can read the file."""
    return "cpu" if getattr(_writing, "on", False) else None


torch.serialization.register_package(0, _as_on_cpu, lambda storage, location: None)  # asked first


def write(content: Mapping[str, Any], file: StateFile, what: str) -> None:
    """Saves what `weights_only=True` reads, and has it read; on whatever device it is, the bytes are the same."""
    plain = _plain(content, what)
    tried = io.BytesIO()
    _writing.on = True
    summed = get_crc32_options()
    set_crc32_options(False)  # twice as fast; the manifest has a SHA-256
    try:
        torch.save(_emptied(plain), tried)
        tried.seek(0)
        torch.load(tried, weights_only=True)
        torch.save(plain, cast(BinaryIO, file))
    finally:
        _writing.on = False
        set_crc32_options(summed)


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: StateFile) -> None:
    """Writes a safetensors file as it is laid out (https://github.com/huggingface/safetensors#format), of which the
    library would first make a copy: the length of the header, the header as JSON, the values."""
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    example = save(empty)  # which has what the library calls the types
    named = json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    for name in order:
        end = offset + tensors[name].nbytes
        place = {"shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        header[name] = {"dtype": named[name]["dtype"]} | place
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        values = tensors[name].resolve_conj().resolve_neg().cpu().contiguous()
        file.write(values.reshape(-1).view(torch.uint8).numpy())


def read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def revived(value: Any, number: Callable[[np.generic], Any] = lambda found: found) -> Any:
    """Returns what `_plain` was given; `number` is called with numbers of numpy."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        if value.keys() == {_NUMBER}:
            return number(value[_NUMBER].numpy()[()])
        return {key: revived(item, number) for key, item in value.items()}
    return type(value)(revived(item, number) for item in value) if type(value) in (list, tuple) else value


def _plain(value: Any, where: str) -> Any:
    """Returns `value` as the types that can be read without running code; refuses others while there is time."""
    if value is None or type(value) in (*_SCALARS, Tensor, nn.Parameter):
        return value
    if (
        isinstance(value, (np.ndarray, np.generic))
        and value.dtype.kind in "biufc"
        and value.dtype.name not in _TOO_WIDE
    ):
        # what went through numpy is what it was when it is loaded: an array, or a number such as a learning rate
        kind = _ARRAY if isinstance(value, np.ndarray) else _NUMBER
        return {kind: torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))}
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, Mapping):
        return {_plain_key(key, f"a key of {where}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (torch.dtype, torch.device, complex)):
        return value
    for scalar in _SCALARS:
        if isinstance(value, scalar):  # for example an enumeration that is a number
            return scalar(value)
    raise ConfigError(
        "a checkpoint must contain only numbers, text and tensors: loading must not run code",
        f"{where} is a {type(value).__name__}",
        "remove such objects from the optimizer's groups and state;\n"
        "to save them with extra= give them state_dict() and load_state_dict()",
    )


def _emptied(value: Any) -> Any:
    """Returns the same structure without the tensors' values."""
    if isinstance(value, Tensor):
        empty = torch.empty(0, dtype=value.dtype)
        return nn.Parameter(empty, requires_grad=False) if isinstance(value, nn.Parameter) else empty
    if isinstance(value, dict):
        return {key: _emptied(item) for key, item in value.items()}
    return type(value)(map(_emptied, value)) if type(value) in (list, tuple) else value


def _plain_key(key: Any, where: str) -> Any:
    return _plain(key.item() if isinstance(key, np.generic) else key, where)
