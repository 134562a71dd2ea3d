"""What Keras does in its own way on each backend."""
