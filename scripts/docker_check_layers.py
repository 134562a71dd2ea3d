"""Reads `docker save`'s output on standard input and names every file, of any layer, that no image may hold.

Those are private keys, certificates that only the building machine has, and pip settings. Exit code 1 if there is one.
"""

from __future__ import annotations

import re
import sys
import tarfile
from collections.abc import Iterator
from typing import IO

NAMES = re.compile(
    r"(^|/)(ssh_host_\w+_key|id_(rsa|dsa|ecdsa|ed25519)|pip\.conf|\.pypirc|\.netrc)$|^usr/local/share/ca-certificates/."
)
# a private key by its text; packages have such texts in their own tests and documentation
LOOKED_INTO = re.compile(r"^(etc|home|root|work|cluster|tmp|run|var)/")
KEY_TEXT = b"PRIVATE KEY-----"
LARGEST_KEY_BYTES = 64 * 1024


def found_in_layer(layer: IO[bytes]) -> Iterator[str]:
    """Names of files in one layer, an uncompressed or compressed tar; nothing if it is no tar."""
    try:
        files = tarfile.open(fileobj=layer, mode="r|*")  # noqa: SIM115 - below; the try is for opening only
    except tarfile.ReadError:  # the image's own JSON files
        return
    with files:
        for file in files:
            if not file.isfile():
                continue
            name = file.name.removeprefix("./")
            if NAMES.search(name):
                yield name
            elif LOOKED_INTO.search(name) and file.size <= LARGEST_KEY_BYTES:
                text = files.extractfile(file)
                if text is not None and KEY_TEXT in text.read():
                    yield f"{name} (a private key)"


def main() -> int:
    layers, found = 0, []
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as image:
        for member in image:
            content = image.extractfile(member) if member.isfile() else None
            if content is not None:
                layers += 1
                found += list(found_in_layer(content))
    for name in found:
        print(f"must not be in the image: {name}")
    if not layers:
        print("standard input holds no image")
    return 1 if found or not layers else 0


if __name__ == "__main__":
    sys.exit(main())
