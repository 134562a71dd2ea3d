"""A wheel of a few lines, to see what pip does with its name and what it asks for."""

from __future__ import annotations

import zipfile
from pathlib import Path

METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Dist: cloudpickle
Requires-Dist: pyspark ; extra == 'spark'
Provides-Extra: spark

Requires-Dist: this is no field, but text
"""


def tiny_wheel(folder: Path, name: str = "horovod", version: str = "0.28.1", metadata: str = METADATA) -> Path:
    """Writes the wheel of a package of that name, for every machine."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{name}/run.sh": "#!/bin/sh\n",
        f"{info}/METADATA": metadata.format(name=name, version=version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tiny\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    wheel = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for file, text in files.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = (0o755 if file.endswith(".sh") else 0o644) << 16
            packed.writestr(entry, text)
    return wheel
