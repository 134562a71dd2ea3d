"""A script on Horovod: its names, and what becomes of each of its nodes."""
