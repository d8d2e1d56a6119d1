"""Plans and AQN in Hugging Face trainers, TRL's included."""
