"""Plans inside torch.compile: the operator as compiled graphs call it, and noise that inductor fuses."""
