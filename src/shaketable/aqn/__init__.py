"""AQN, adaptive quantization noise: specification, schedules, and noise on the weights of a sampler."""
