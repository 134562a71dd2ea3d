"""Converts scripts on Horovod's Keras."""
