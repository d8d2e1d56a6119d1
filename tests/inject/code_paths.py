"""One small model, and every code path in which a plan can meet it: eager, checkpointed, compiled, on a GPU, in a CUDA graph.

A path knows how to run one training step (and a pass of each other phase) and returns what came out. As a program, this file
runs one step in a path and prints a digest of the result: that is what `shaketable run` is given.

The device of the paths that need one is CUDA; with SHAKETABLE_TEST_DEVICE=cpu they run on a CPU, all but the captured one.
"""

import gc
import os
import sys
from contextlib import contextmanager
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS = 32, 2, 2
DEVICE = os.environ.get("SHAKETABLE_TEST_DEVICE", "cuda")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Block(nn.Module):
    """A norm, a product with a bias, attention, an activation and a product without one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        rows, n, _ = x.shape
        q, k, v = self.qkv_proj(self.norm(x)).view(rows, n, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, n, WIDTH)
        return x + self.o_proj(F.silu(mixed))


class Tower(nn.Module):
    """Two blocks; `reentrant` says how they are checkpointed, None that they are not."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Path:
    """A model and how it is called."""

    def __init__(self, reentrant=None, backend=None, device="cpu"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Tower(reentrant).to(device)
        self.call = torch.compile(self.model, backend=backend) if backend else self.model
        self.x = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()

    def prepare(self):
        """What has to be done once more when a plan is there."""

    def train(self):
        """Output and gradients of one training step."""
        self.model.train()
        leaves = [self.x, *self.model.parameters()]
        for leaf in leaves:
            leaf.grad = None
        y = self.call(self.x)
        y.square().mean().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def infer(self, phase):
        """The output without gradients in a phase."""
        import shaketable as st

        self.model.eval()
        with torch.no_grad(), st.phase(phase):
            return [self.call(self.x)]

    def work(self, phases=("train",)):
        return [y for phase in phases for y in (self.train() if phase == "train" else self.infer(phase))]


class Captured(Path):
    """A training step in a CUDA graph; `work` replays it."""

    def __init__(self):
        super().__init__(device="cuda")
        self.prepare()

    def prepare(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.train()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()  # a graph of an earlier test that is freed by chance during a capture spoils it
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.train()
        torch.cuda.synchronize()

    def work(self, phases=("train",)):
        self.graph.replay()
        torch.cuda.synchronize()
        return [y.clone() for y in self.out]


PATHS = {
    "eager": Path,
    "checkpointed": lambda: Path(reentrant=False),
    "reentrant": lambda: Path(reentrant=True),
    "aot_eager": lambda: Path(backend="aot_eager"),
    "aot_eager checkpointed": lambda: Path(reentrant=False, backend="aot_eager"),
    "inductor": lambda: Path(backend="inductor"),
    "device": lambda: Path(device=DEVICE),
    "device inductor": lambda: Path(backend="inductor", device=DEVICE),
    "captured": Captured,
}


class Checkpointed(nn.Module):
    """Checkpoints a leaf, a bare product, two modules at once, or one container."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.first = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.second = nn.Sequential(nn.Linear(8, 8))
        self.leaf = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, reentrant=None):
        body = {
            "leaf": lambda x: self.leaf(x).tanh(),
            "product": lambda x: (x @ self.weight).tanh(),
            "two": lambda x: self.second(self.first(x)).tanh(),
            "container": lambda x: self.first(x).tanh(),
        }[self.what]
        for _ in range(2):
            x = body(x) if reentrant is None else checkpoint(body, x, use_reentrant=reentrant)
        return self.leaf(x).sum()


class Body(nn.Module):
    """A module whose forward is the function it was given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def kernels_that_repeat():
    """Kernels that give the same bits twice; those of a GPU need to be told."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


deterministic = contextmanager(kernels_that_repeat)


def digest(results):
    """All bits of some tensors in a line."""
    return sha256(b"".join(y.contiguous().numpy().tobytes() for y in results)).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(digest(PATHS[sys.argv[1]]().train()))
