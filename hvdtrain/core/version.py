"""hvdtrain's own version, as in `setup.cfg`; the probe reads it from here."""

__version__ = "0.1.0"
