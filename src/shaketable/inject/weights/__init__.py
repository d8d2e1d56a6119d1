"""Faulty weights: made when they are read, prepared at the head of a pass, or written in place in engines."""
