"""What comes of a call: a result, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.core.errors import HvdtrainError


def outcome(act: Callable[[], Any]) -> str:
    try:
        return f"nothing raised: {act()}"
    except HvdtrainError as error:
        return str(error)
