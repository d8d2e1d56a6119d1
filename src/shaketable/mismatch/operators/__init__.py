"""The sixth rung: what each operator of the engine read and made, judged by the trainer's weights and definitions."""
