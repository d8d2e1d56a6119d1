"""One device against another: fingerprints, teacher forcing, and the error model that fits."""
