"""The short ways: what a plan does on a card without hooks, frames or autograd functions, where nothing is in the way.

Each gives the values, the ledger and the gradients of the ordinary way (`modules.py`, `operators.py`, `weights.py`), which
stays for everything that is not plain: other threads, streams, modes, tensor subclasses, gradients of gradients.

- `swift`, `swift_inputs`: what linears return, and what they are given.
- `products`, `pulled`, `keyed`, `hushed`: products and linears in training, and keeping the operator mode out of norms.
- `ready`, `ready_draws`, `weight_classes`: faulty weights, made at the head of a pass.
"""
