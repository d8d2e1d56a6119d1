"""The record of a run: one append-only file, held together by a chain of hashes, and what it was made with."""
