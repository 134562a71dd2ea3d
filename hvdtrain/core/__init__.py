"""Errors, flags, launchers, learning rates and which samples are a rank's: what needs no other rank.

Here itself: public names that are looked up on first use, so that importing a package costs milliseconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def public(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        homes: its public names, with blanks between them, by the module below it that has them.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def look_up(name: str) -> Any:
        if name not in home_of:
            above = package.rpartition(".")[0]
            its = f"; {above} has it: {above}.{name}" if name in getattr(sys.modules.get(above), "__all__", ()) else ""
            message = f"module {package!r} has no attribute {name!r}{its}"
            raise AttributeError(message, name=name, obj=sys.modules[package])  # Python adds names that are alike
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next look-up is a plain global
        return value

    return look_up, lambda: sorted({*vars(sys.modules[package]), *home_of}), sorted(home_of)
