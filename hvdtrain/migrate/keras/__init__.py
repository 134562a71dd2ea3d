"""Scripts on Horovod's Keras."""
