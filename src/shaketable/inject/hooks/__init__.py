"""What places the fault operator on modules and operators of a model that is not compiled."""
