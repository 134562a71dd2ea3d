"""hvdtrain's own version, as in `setup.cfg` (the probe reads it from here), and what depends on Python's."""

import sys

__version__ = "0.1.0"

# Keeps the working directory off sys.path, where a user's random.py would hide Python's own. Python 3.10 lacks it.
SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
