"""A rank's samples: the loader, its workers, what they read, and where it stands."""
