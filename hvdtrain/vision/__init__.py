"""What the programs that train on pictures share."""
