"""Tasks, scores, sweeps and statistics: what a fault costs, and how sure that is."""
