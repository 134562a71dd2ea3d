"""Jobs that take turns, and what every benchmark prints."""
