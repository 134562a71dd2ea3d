"""Prints the requirements file of an image: hvdtrain's own requirements and extras, as setup.cfg pins them.

    python requirements.py cpu|cuda|cuda-tensorflow FRAMEWORKS TORCH_INDEX
    python requirements.py --lock REPORT REQUIREMENTS

FRAMEWORKS: extras of setup.cfg, with commas between them; empty: the variant's default. TORCH_INDEX: a package index
that is asked as well ("" for none), for PyTorch's CPU builds, which are not on PyPI. With --lock: what pip installed,
as it reported it, each package with its hash: pip then takes nothing else. Only the standard library is used.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DEFAULTS = {"cpu": "keras", "cuda": "torch,keras,gpu", "cuda-tensorflow": "keras,gpu"}
# The CUDA 12 libraries of TensorFlow's build for GPUs and PyTorch's of CUDA 13 are the same files (nvidia/cudnn/lib,
# nvidia/nccl/lib): an image for GPUs has one of the two. With PyTorch, Keras computes on it, and TensorFlow's build for
# CPUs would be of no use.
FOR_CPUS, FOR_GPUS = "tensorflow-cpu", "tensorflow[and-cuda]"


def requirements(setup_cfg: str, variant: str, frameworks: str, torch_index: str) -> list[str]:
    """The lines of the file.

    Args:
        setup_cfg: the text of setup.cfg.
        variant: one of DEFAULTS.
        frameworks: extras, with commas between them; "" for the variant's default.
        torch_index: URL of a further index, or "".

    Raises:
        ValueError: a variant or an extra that does not exist, or a variant without what it is for.
    """
    if variant not in DEFAULTS:
        raise ValueError(f"VARIANT must be {', '.join(DEFAULTS)}, not {variant!r}")
    setup = configparser.ConfigParser()
    setup.read_string(setup_cfg)
    extras = setup["options.extras_require"]
    wanted = [name.strip() for name in (frameworks or DEFAULTS[variant]).split(",") if name.strip()]
    unknown = [name for name in wanted if name not in extras]
    if unknown:
        raise ValueError(f"FRAMEWORKS must be extras of setup.cfg ({', '.join(extras)}), not {', '.join(unknown)}")
    if not {"torch", "keras"} & set(wanted):
        raise ValueError(f"FRAMEWORKS must have torch or keras in it: Horovod is built for them; received: {wanted}")
    if variant == "cuda" and "torch" not in wanted:
        raise ValueError("VARIANT=cuda needs torch in FRAMEWORKS: TensorFlow's is VARIANT=cuda-tensorflow")
    if variant == "cuda-tensorflow" and "torch" in wanted:
        raise ValueError("VARIANT=cuda-tensorflow takes no torch: the CUDA libraries of both are the same files")
    lists = [setup["options"]["install_requires"], *(extras[name] for name in [*wanted, "build"])]
    lines = [line.strip() for text in lists for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if variant == "cuda":
        lines = [line for line in lines if not line.startswith(FOR_CPUS)]
    if variant == "cuda-tensorflow":
        lines = [line.replace(FOR_CPUS, FOR_GPUS) for line in lines]
    return [*([f"--extra-index-url {torch_index}"] if torch_index else []), *dict.fromkeys(lines)]


def lock(report: str, asked: str) -> list[str]:
    """The lines of a requirements file for exactly what was installed.

    Args:
        report: of `pip install --report`.
        asked: the requirements file it was given, whose options (further indexes) stay.

    Raises:
        ValueError: a package came without a hash.
    """
    lines = [line for line in asked.splitlines() if line.startswith("--") and "hash" not in line]
    for its in json.loads(report)["install"]:
        name, hashes = its["metadata"]["name"], its["download_info"].get("archive_info", {}).get("hashes", {})
        place = urlsplit(its["download_info"]["url"])
        if "sha256" not in hashes and place.scheme == "file":  # pip before 23.1 gives none of a file on this machine
            hashes = {"sha256": hashlib.sha256(Path(unquote(place.path)).read_bytes()).hexdigest()}
        if "sha256" not in hashes:
            raise ValueError(f"{name} was installed from {place.geturl()}, without a hash")
        lines.append(f"{name}=={its['metadata']['version']} --hash=sha256:{hashes['sha256']}")
    return lines


def main() -> int:
    try:
        if sys.argv[1] == "--lock":
            lines = lock(*(Path(name).read_text(encoding="utf-8") for name in sys.argv[2:4]))
        else:
            lines = requirements(Path("setup.cfg").read_text(encoding="utf-8"), *sys.argv[1:])
        print("\n".join(lines))
    except ValueError as error:
        print(f"requirements.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
