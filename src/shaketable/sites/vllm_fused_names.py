"""What a sampling engine computes as one product, by the names of a checkpoint. Configs are checked with it: no torch."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""What an engine has in place of a projection of the checkpoint."""
