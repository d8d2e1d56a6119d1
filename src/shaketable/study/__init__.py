"""Studies: arms by seeds, their runs in a store, and what they came to."""
