"""Arguments of a bench."""

from __future__ import annotations

import argparse

from hvdtrain.bench import train


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(flags)
