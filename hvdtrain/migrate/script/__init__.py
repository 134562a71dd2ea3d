"""Reads a script on Horovod, and decides what becomes of each of its nodes."""
