"""What an injection keeps in the memory of a GPU, and what a captured graph depends on."""
