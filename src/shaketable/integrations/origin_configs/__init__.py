"""Configs of the study that this project re-implements, as a plan and an AQN."""
