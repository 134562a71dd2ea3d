"""What a run leaves behind: checkpoints, its record, where its time went."""
