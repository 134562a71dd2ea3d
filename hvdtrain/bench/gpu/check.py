"""The program that runs one check of `hvdtrain bench gpu`."""

from __future__ import annotations

import argparse
import importlib
import sys


def main() -> int:
    """Returns the check's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="module of this folder")
    parser.add_argument("engine", nargs="?")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shared", action="store_true", help="ranks share a device")
    args = parser.parse_args()
    code: int | None = importlib.import_module(f"hvdtrain.bench.gpu.{args.job}").check(args)
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
