"""Jobs that take turns, and the frame of every benchmark: start, progress, result file."""
