"""Faulty weights: made when they are read, or written in place in engines."""
