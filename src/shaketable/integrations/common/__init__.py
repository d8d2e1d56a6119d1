"""What all frameworks share: instructions to workers, their reports, and the check of sampler against trainer."""
