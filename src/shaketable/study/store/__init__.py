"""The store of a study: a folder of runs, listed fast."""
