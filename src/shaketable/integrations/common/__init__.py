"""Shared by all frameworks: instructions to workers, their reports, and the check of sampler against trainer."""
