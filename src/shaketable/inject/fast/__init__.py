"""The fast path of a GPU: kernels launched without hooks, frames or autograd functions, where nothing is in the way.

A forward pass of a small model on a GPU waits for Python, so a hook and an autograd function cost more than the linear they
are on. Each file here gives the values, the counts and the gradients of `inject/fault_operator.py`, which does everything that
is not plain: other faults and types, other modes, tensor subclasses, gradients of gradients.

| file | applies to | H200, SmolLM2, ratio to clean (without it) |
|---|---|---|
| `linear.py` | noise on what an `nn.Linear` returns | prefill 1.23 (1.59) |
| `products.py` | `F.linear` under an operator plan, forward and backward | training step 1.31 before it was rewritten (2.23) |
| `inputs.py` | formats on what an `nn.Linear` is given | with `weights/prepared.py`: W4A4 1.33 (2.84) |
| `weights/prepared*.py` | faulty weights, all by one launch when a pass begins | AQN in `generate` 1.02 (1.29) |
"""
