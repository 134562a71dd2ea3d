"""Records of tar files as a stream: docs/how-data.md."""

import glob
import io
import random
import tarfile
from pathlib import Path

import hvdtrain
import hvdtrain.torch as hvt

Path("shards").mkdir()
for shard in range(3):
    with tarfile.open(f"shards/{shard}.tar", "w") as tar:
        for number in range(20):
            for kind, text in (("jpg", bytes([number])), ("cls", str(20 * shard + number).encode())):
                info = tarfile.TarInfo(f"{number:03}.{kind}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))


def read(shards):
    for shard in shards:
        with tarfile.open(shard) as tar:
            parts = [(member.name.split("."), tar.extractfile(member).read()) for member in tar]
        for ((_, first), jpg), ((_, second), cls) in zip(parts[::2], parts[1::2], strict=True):
            yield {first: jpg, second: cls}


def picture(jpg):
    return float(jpg[0])


hvdtrain.init("torch")
# the page
seen = sorted(int(label) for _, labels in train for label in labels)
assert seen == list(range(60)), seen
