"""`python -m hvdtrain.horovod_build`: `hvdtrain build-horovod` without the rest of the package.

For images: a stage that holds only this folder and hvdtrain/core/errors.py compiles again only when those change.
"""

from __future__ import annotations

import argparse
import sys

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser("python -m hvdtrain.horovod_build")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except HvdtrainError as error:
        print(f"build-horovod: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
