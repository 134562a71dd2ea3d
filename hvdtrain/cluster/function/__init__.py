"""A function on N ranks, and a job rehearsed on this machine."""
