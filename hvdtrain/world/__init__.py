"""The ranks as programs hold them: joined, seeded, with the same data."""
