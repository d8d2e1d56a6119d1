"""What a study found, from the records of its runs alone."""
