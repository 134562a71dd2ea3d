"""Which rank waits for which: meetings, hangs, and preemption."""
