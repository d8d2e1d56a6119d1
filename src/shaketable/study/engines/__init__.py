"""Where the runs of a study are done: worker processes of this computer, or a Ray cluster."""
