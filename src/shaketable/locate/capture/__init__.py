"""What a model computed, recorded; and what it should be made of."""
