"""Data that is read in an order of its own: dealt without a word among the ranks, and the same on all of them."""
