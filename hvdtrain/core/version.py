"""hvdtrain's own version, as in `setup.cfg` (the probe reads it from here), and what depends on Python's."""

import sys
from types import CodeType

__version__ = "0.2.0"

# Keeps the working directory off sys.path, where a user's random.py would hide Python's own. Python 3.10 lacks it.
SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


def qualified_name(code: CodeType) -> str:
    """Returns a function's name with its class; from Python 3.10 the bare name."""
    return getattr(code, "co_qualname", code.co_name)


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to what an error's traceback prints; Python 3.10 has no room for one."""
    if hasattr(error, "add_note"):
        error.add_note(note)
