"""Other libraries' trainers on hvdtrain: one file for each library, built on public names of both."""
