"""Compile every kernel for a GPU that need not be there, and print what it loads and stores with: run by test_compiles.py."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shaketable.faults.gpu.kernels import begin_pass, clipping, formats, measure, noise, reductions
from shaketable.faults.gpu.tiling import cut, one_row

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "scale": "fp32",
    "whole": "*fp32",
    "unit": "*fp32",
    "out": "*fp32",
    "live": "*fp32",
    "sums": "*fp64",
    "partial": "*fp64",
}
TYPES |= {"bits": "*i32", "rows": "*i32", "keys": "*i64", "clock": "*i64", "own": "*i64"}
ALIGNED = ("x", "y", "g", "whole")


def compiled(kernel, warps=4, dtype="bf16", back=None, **constants):
    """A kernel that `ptxas` has accepted. `back` is the type of gradients, where it is another one."""
    tensors = {"x": f"*{dtype}"} | dict.fromkeys(("y", "g"), f"*{back or dtype}")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else (tensors | TYPES).get(name, "i32") for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ALIGNED}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "enable_fp_fusion": False})


def say(name, kernel):
    ptx = kernel.asm["ptx"]
    moves = sorted(set(re.findall(r"(?:ld|st)\.global[.:\w]*", ptx)))
    exact = "approximate" if re.search(r"div\.(full|approx)|rcp\.approx", ptx) else "exact"
    print(name, exact, *moves, flush=True)


one = one_row(4096)
for name, kind, scope, parts in [
    ("mxfp4", 0, 2, cut(64, 64, 32)),
    ("mxfp4-ragged", 0, 2, cut(64, 80, 32)),
    ("nvfp4", 1, 2, cut(64, 64, 16)),
    ("e4m3-block", 2, 2, cut(64, 256, 128)),
    ("e4m3-token", 2, 2, cut(64, 576, 576)),
    ("e4m3-tiles", 2, 2, cut(64, 8960, 8960)),
    ("e4m3-passes", 2, 2, cut(64, 40960, 40960)),
    ("e5m2-tensor", 3, 1, one),
    ("e5m2-none", 3, 0, one),
]:
    for stochastic in (False, True):
        how = {"KIND": kind, "SCOPE": scope, "STOCHASTIC": stochastic, "FAST": True, **parts.shape}
        say(f"{name}-{stochastic}", compiled(formats.quantize, parts.warps, **how))
for name, scope, parts in [
    ("absolute", 0, one),
    ("tensor", 1, one),
    ("token", 2, cut(64, 576, 576)),
    ("tiles", 2, cut(64, 8960, 8960)),
    ("passes", 2, cut(64, 40960, 40960)),
    ("block", 2, cut(64, 64, 32)),
]:
    for kind in (0, 1):
        for gradient in (False, True):
            how = {"KIND": kind, "SCOPE": scope, "GRADIENT": gradient, "FAST": True, **parts.shape}
            say(f"clip-{name}-{kind}-{gradient}", compiled(clipping.clip, parts.warps, **how))
for name, parts in [("tiles", cut(64, 576, 576)), ("passes", cut(4, 24576, 24576))]:
    how = {"KIND": 0, "SCOPE": 2, "GRADIENT": True, "FAST": True, **parts.shape}
    say(f"clip-{name}-mixed", compiled(clipping.clip, parts.warps, back="fp32", **how))
share = {"ALIGNED": True, "SHARE": 4, "BLOCK": 2048, "FAST": True}
say("sums", compiled(reductions.sums, **share))
say("tops", compiled(reductions.tops, FINITE=True, **share))
say("top_of_tops", compiled(reductions.top_of_tops, FAST=True))
say("moments", compiled(reductions.moments, FAST=True))
for live in (False, True):
    how = {"LIVE": live, "FAST": True, "EVEN": True, "BLOCK": 2048}
    say(f"noise-{live}", compiled(noise.noise, KIND=0, UNIT=True, **how))
    for kind in (2, 3, 4):
        say(f"arithmetic-{kind}-{live}", compiled(noise.arithmetic, KIND=kind, **how))
for moment in (0, 1, 2):
    say(f"begin-{moment}", compiled(begin_pass.begin_pass, MOMENT=moment, TAPS=5, USES=4, BLOCK=16))
for kind in (0, 1, 3, 4, 5):
    say(f"tell-{kind}", compiled(measure.tell, KIND=kind, SPARSE=True, STEPS=16, BLOCK=1024, FAST=True))
say("tell-sums", compiled(measure.twelve_sums, STEPS=16, BLOCK=1024, FAST=True))
