"""Other libraries' trainers on hvdtrain, by public names of both: a file for each library, and what they share."""
