"""What each operator of the engine read and made, judged by the trainer's weights and definitions."""
