"""Where and when: a model's anatomy, what a plan matches in it, and phases."""
