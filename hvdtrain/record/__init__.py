"""The records of a run: its log, and where its time went."""
