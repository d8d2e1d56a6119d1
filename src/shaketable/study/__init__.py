"""Studies: arms by seeds, their runs in a store, and their results."""
