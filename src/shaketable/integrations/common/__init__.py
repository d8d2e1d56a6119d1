"""What all frameworks share: instructions to workers, and their reports."""
