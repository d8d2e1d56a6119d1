"""`shaketable run`: any program, its children and workers, without a change to its code."""
