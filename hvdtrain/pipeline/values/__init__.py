"""Micro-batches, devices, threads and random numbers: what everything in a pipeline stands on."""
