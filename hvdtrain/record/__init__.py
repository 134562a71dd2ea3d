"""What a run leaves behind about itself: its log, and where its time went."""
