"""Threads of pipelines that are gone: they end by themselves, a moment later."""

from __future__ import annotations

import gc
import threading


def threads_left(patience_s: float = 20) -> int:
    """Returns how many threads this process has when all that are ending have ended; of pipelines in use: none."""
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(patience_s)
    return threading.active_count()
