"""A robustness curve: models, magnitudes and seeds on one sample of problems."""
