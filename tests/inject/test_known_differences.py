"""What a plan does not do yet in one place as in another: each a failing test, with the reason in its mark.

A test that begins to pass fails the run (`strict`), and its mark goes. Tests without a mark stand beside those that have one:
they pass today and say where the border of the difference is.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shaketable as st
from tests import slow
from tests.inject.code_paths import Body, Tower

pytestmark = pytest.mark.usefixtures("fresh_graphs")
NOISE = "relative_gaussian:0.05"


def known(reason, raises=AssertionError):
    return pytest.mark.xfail(strict=True, reason=reason, raises=raises)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


def spots(ledger, clause=0):
    """Fires forward and backward of every spot that fired."""
    return {name: (s.fires(False), s.fires(True)) for name, s in ledger.sites[clause].spots.items() if s.counts}


# ---- 1. the head of a language model that TRL multiplies by itself
#
# `trl.trainer.utils.add_fused_lm_head` calls the backbone, then multiplies by `lm_head.weight` inside an autograd function,
# tile by tile: forward `torch.mm(hidden, weight[a:b].to(dtype).t(), out=tile)`; backward the same product once more, and
# `acc.addmm_(…)` for the gradients of hidden states and weight. The head's module is never called.

TOKENS = torch.arange(16).view(2, 8)
DECODER = {"layer.0.matmul": (7, 14), "layer.1.matmul": (7, 14)}
HEADS = {
    "float32": {},
    "tied": {"tied": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
    "head in float32": {"dtype": torch.bfloat16, "cast": True},
    "two tiles": {"tile": 48},
    "checkpointed": {"reentrant": False},
    "reentrant": {"reentrant": True},
    "compiled": {"is_compiled": True},
}


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, tie_word_embeddings=tied)).train()


def trained(
    monkeypatch,
    plan,
    fused=True,
    tied=False,
    dtype=None,
    autocast=False,
    cast=False,
    tile=None,
    reentrant=None,
    is_compiled=False,
):
    """The ledger and the gradients of one step of a model that TRL has given its head."""
    utils = pytest.importorskip("trl.trainer.utils")
    model = llama(tied).to(dtype)
    if fused:
        utils.add_fused_lm_head(model, cast_lm_head_to_fp32=cast, outputs=("log_probs", "entropy"))
    if tile is not None:
        monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", tile)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    function = compiled(model) if is_compiled else model
    head = {"fused_lm_head": True} if fused else {}
    shaken = st.inject(model, plan, seed=1, allow_inert=True) if plan else nullcontext()
    with shaken as ledger, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = function(input_ids=TOKENS, labels=TOKENS, **head).loss
        loss.backward()
    return ledger, [loss.detach(), *(p.grad for p in model.parameters())]


def is_named(ledger):
    """Whether the ledger says that products of the head are not covered."""
    return any("lm_head" in note for site in ledger.sites for note in site.notes)


@pytest.mark.parametrize("how", [slow(how) if how == "compiled" else how for how in HEADS])
def test_a_head_that_is_not_named_is_left_alone_where_trl_multiplies_by_it(monkeypatch, how):
    ledger, _ = trained(monkeypatch, f"{NOISE}@op.matmul", **HEADS[how])
    assert spots(ledger) == DECODER


TILES = {"two tiles": 2}


@pytest.mark.parametrize("how", [slow(how) if how == "compiled" else how for how in HEADS])
def test_a_head_that_is_named_is_met_forward_and_backward_where_trl_multiplies_by_it(monkeypatch, how):
    """One product a tile, and two gradients; the product that backward computes again is none more."""
    ledger, _ = trained(monkeypatch, f"{NOISE}@op.matmul,include=lm_head", **HEADS[how])
    found = {name: counts for name, counts in spots(ledger).items() if name not in DECODER}
    n = TILES.get(how, 1)
    assert is_named(ledger) or list(found.values()) == [(n, 2 * n)]


def test_the_fused_head_has_the_gradients_of_the_plain_one(monkeypatch):
    """Without a plan: what the next test needs."""
    (_, plain), (_, fused) = trained(monkeypatch, None, fused=False), trained(monkeypatch, None)
    torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_it_has_them_under_a_steady_fault(monkeypatch, direction):
    plan = f"gain:0.5@op.matmul,include=lm_head,direction={direction}"
    (_, plain), (ledger, fused) = trained(monkeypatch, plan, fused=False), trained(monkeypatch, plan)
    torch.testing.assert_close(fused[0], plain[0])
    if not is_named(ledger):
        torch.testing.assert_close(fused[1:], plain[1:])


def test_a_head_that_a_module_clause_names_is_met_or_named(monkeypatch):
    ledger, _ = trained(monkeypatch, f"{NOISE}@module.linear,include=lm_head")
    assert is_named(ledger) or spots(ledger).get("lm_head") == (1, 0)


def test_a_head_that_is_called_is_not_named(monkeypatch):
    ledger, _ = trained(monkeypatch, f"{NOISE}@module.linear,include=lm_head", fused=False)
    assert spots(ledger)["lm_head"] == (1, 0) and not is_named(ledger)


# ---- 2. products that are compiled otherwise than called

A = torch.linspace(-1, 1, 16).view(4, 4)


def into(function, shape):
    """A product that writes into a tensor of ours, which is what goes on."""

    def forward(a, b):
        c = torch.zeros(shape)
        function(c, a, b)
        return c * 1

    return forward


WRITTEN = {
    "addmm_": into(lambda c, a, b: c.addmm_(a, b), (4, 4)),
    "addmm_ of a part": into(lambda c, a, b: c[:4].addmm_(a, b), (8, 4)),
    "baddbmm_": into(lambda c, a, b: c.baddbmm_(a[None], b[None]), (1, 4, 4)),
    "addbmm_": into(lambda c, a, b: c.addbmm_(a[None], b[None]), (4, 4)),
    "addmv_": into(lambda c, a, b: c.addmv_(a, b[0]), (4,)),
    "addmm_, returned": lambda a, b: torch.zeros(4, 4).addmm_(a, b),
    "mm, out": into(lambda c, a, b: torch.mm(a, b, out=c), (4, 4)),
    "addmm, out": into(lambda c, a, b: torch.addmm(a, a, b, out=c), (4, 4)),
    "bmm, out": into(lambda c, a, b: torch.bmm(a[None], b[None], out=c), (1, 4, 4)),
    "matmul, out": into(lambda c, a, b: torch.matmul(a, b, out=c), (4, 4)),
    "mm, out of a part": into(lambda c, a, b: torch.mm(a, b, out=c[:4]), (8, 4)),
    "matmul, out, returned": lambda a, b: torch.matmul(a, b, out=torch.empty(4, 4)),
}


def both_ways(function, grad, plan):
    """Ledger and output of a function, eager and compiled."""
    found = []
    for call in (lambda model: model, compiled):
        model, inputs = Body(function), [A.clone().requires_grad_(grad), (A + 1).requires_grad_(grad)]
        with st.inject(model, plan, allow_inert=True) as ledger:
            y = call(model)(*inputs)
            if grad:
                y.square().sum().backward()
        found.append((ledger, y.detach()))
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_a_product_that_writes_to_a_tensor_is_hit_there_when_it_is_compiled(name):
    (eager, expected), (ledger, y) = both_ways(WRITTEN[name], False, "gain:0.5@op.matmul")
    assert spots(eager) == {"matmul": (1, 0)}
    assert spots(ledger) == spots(eager)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    "name",
    ["addmm_", "addmm_ of a part", "baddbmm_", "addmm_, returned"],
)
def test_the_same_with_gradients(name):
    (eager, _), (ledger, _) = both_ways(WRITTEN[name], True, f"{NOISE}@op.matmul")
    assert spots(eager) == {"matmul": (1, 2)}
    assert spots(ledger) == spots(eager)


LISTS = {
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), 2),
    "einsum of a list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), 2),
    "einsum of a tuple": (lambda a, b: torch.einsum("ij,jk,kl->il", (a, b, a)), 3),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b, a]), 3),
    "chain_matmul": (lambda a, b: torch.chain_matmul(a, b, a), 3),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), 2),
}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize(
    "name",
    LISTS,
)
def test_gradients_of_tensors_in_a_list_are_hit_when_they_are_compiled(name):
    function, gradients = LISTS[name]
    (eager, _), (ledger, _) = both_ways(function, True, f"{NOISE}@op.matmul")
    assert spots(eager) == {"matmul": (1, gradients)}
    assert spots(ledger) == spots(eager)


class SelfAttention(nn.Module):
    def __init__(self, weights):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.weights = nn.MultiheadAttention(8, 2, batch_first=True), weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.weights)[0]


ATTENTION = {
    "multi-head": lambda: SelfAttention(weights=True),
    "multi-head without weights": lambda: SelfAttention(weights=False),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    "scaled dot product": lambda: Body(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
}


@pytest.mark.parametrize("math", [False, True], ids=["any backend", "math alone"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_opened_into_its_products_when_it_is_compiled(name, math):
    found = []
    for call in (lambda model: model, compiled):
        model, x = ATTENTION[name](), torch.linspace(-1, 1, 48).view(2, 3, 8).requires_grad_()
        with (
            sdpa_kernel(SDPBackend.MATH) if math else nullcontext(),
            st.inject(model, f"{NOISE}@op.all", allow_inert=True) as ledger,
        ):
            call(model)(x).square().sum().backward()
        found.append((spots(ledger), ledger.sites[0].fused))
    assert found[0][0]
    assert found[1] == found[0]


# ---- 3. the reference that is the policy with its adapters off


def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(Tower(), peft.LoraConfig(r=2, target_modules=["qkv_proj"], init_lora_weights=False))


def reference(model, call, x, grad, inside):
    """A pass with the adapters off, and its gradient, asked for while they are off or when they are on again."""
    with torch.set_grad_enabled(grad), model.disable_adapter():
        y = call(x)
        found = [*torch.autograd.grad(y.square().mean(), x)] if grad and inside else []
    if grad and not inside:
        found = [*torch.autograd.grad(y.square().mean(), x)]
    return [y.detach(), *found]


PASSES = {"no gradients": (False, False), "gradients inside": (True, True), "gradients afterwards": (True, False)}
SITES = ["module.linear", "module.linear,point=weight", "module.linear,direction=both", "layer.all", "op.matmul", "op.all"]
SKIPPED = [
    (call, site, when)
    for call in ("eager", "compiled")
    for site in (SITES if call == "eager" else [SITES[0], SITES[2], SITES[4]])
    for when in PASSES
]


@pytest.mark.parametrize(("call", "site", "when"), [slow(*row) if row in SKIPPED[-8:] else row for row in SKIPPED])
def test_a_pass_of_the_reference_is_left_alone(call, site, when):
    from shaketable.integrations.hf.callback import reference_test

    model, x = adapted(), torch.linspace(-1, 1, 2 * 4 * 32).view(2, 4, 32).requires_grad_()
    function = compiled(model) if call == "compiled" else model
    clean = reference(model, function, x, *PASSES[when])
    injection = st.inject(model, f"{NOISE}@{site}")
    injection.skip_pass = reference_test(model)
    with injection as ledger:
        function(x).square().mean().backward()
        before = ledger.forward, ledger.backward
        found = reference(model, function, x, *PASSES[when])
        assert (ledger.forward, ledger.backward) == before
        assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))
        function(x).square().mean().backward()
        assert (ledger.forward, ledger.backward) == (2 * before[0], 2 * before[1])


# ---- 4. autocast: a product does not read what its module is given


class Two(nn.Module):
    def __init__(self, representable):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.x = torch.randn(32, 64)
        if representable:
            self.x = self.x.bfloat16().float()
            for p in self.parameters():
                p.data = p.data.bfloat16().float()

    def forward(self):
        return self.two(self.one(self.x).tanh())


@pytest.mark.parametrize("call", ["eager", "compiled"])
@pytest.mark.parametrize("representable", [True, False], ids=["bfloat16 already", "any values"])
@pytest.mark.parametrize("point", ["input", "weight", "weight+input"])
def test_a_fault_that_autocast_undoes_is_inert(point, representable, call):
    """The product reads bfloat16, in which 1e-5 of a value is nothing: as the same fault on an output, it has to be told."""
    model = Two(representable)
    function = compiled(model) if call == "compiled" else model
    with (
        pytest.raises(st.InertError),
        st.inject(model, f"relative_gaussian:1e-5@module.linear,point={point}", seed=1),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        function()


@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_the_same_fault_on_an_output_is_inert_already(call):
    model = Two(False)
    function = compiled(model) if call == "compiled" else model
    plan = "relative_gaussian:1e-5@module.linear"
    with pytest.raises(st.InertError), st.inject(model, plan, seed=1), torch.autocast("cpu", torch.bfloat16):
        function()


@pytest.mark.parametrize("call", ["eager", "compiled"])
@pytest.mark.parametrize("point", ["input", "weight", "output"])
def test_a_fault_that_survives_autocast_is_measured(point, call):
    model = Two(False)
    function = compiled(model) if call == "compiled" else model
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        clean = function()
        with st.inject(model, f"relative_gaussian:0.1@module.linear,point={point}", seed=1) as ledger:
            assert not torch.equal(function(), clean)
    site = ledger.to_dict()["sites"][0]
    assert site["forward"] == 2
    assert site["measured_magnitude"] == pytest.approx(0.1, rel=0.05)
    assert site["measured_error"] == pytest.approx(0.1, rel=0.1)


# ---- 5. fused attention in a compiled graph


@pytest.mark.parametrize("site", ["op.matmul", "op.all", "op.softmax+matmul"])
def test_compiled_plans_note_the_attention_that_they_cannot_open(site):
    found = []
    for call in (lambda model: model, compiled):
        torch.manual_seed(0)
        model = Tower()
        with st.inject(model, f"{NOISE}@{site}") as ledger:
            call(model)(torch.ones(1, 4, 32)).sum().backward()
        found.append((ledger.sites[0].fused, "not exposed" in str(ledger)))
    assert found[0] == (2, True)
    assert found[1] == found[0]


def test_checkpointed_attention_is_noted_once_when_it_is_compiled():
    torch.manual_seed(0)
    model = Tower(reentrant=False)
    with st.inject(model, f"{NOISE}@op.matmul") as ledger:
        compiled(model)(torch.ones(1, 4, 32, requires_grad=True)).sum().backward()
    assert ledger.sites[0].fused == 2


# ---- 6. graph breaks under an operator plan
#
# Where dynamo gives up a frame (a break inside a loop over layers), it runs it eagerly and compiles what it calls: also our
# `__torch_function__`, whose `func` it does not guard when that is a method of a tensor. So torch 2.13 calls the function of an
# earlier operator: `x.square().mean()` becomes `x.square().square()`, under any torch function mode.


class Looped(nn.Module):
    """Layers in a loop, each with something in it at which a graph may break."""

    def __init__(self, something):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Body(something)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def broken(x):
    torch._dynamo.graph_break()
    return x


BREAKS = {
    "nothing": lambda x: x * 2,
    "graph_break": broken,
    "item": lambda x: x * 2 if x.sum().item() > -1e9 else x,
    "a condition": lambda x: x * 2 if x.sum() > -1e9 else x,
    "unflatten": lambda x: x.unflatten(-1, (2, 4)).flatten(-2),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_graph_that_breaks_in_a_loop_computes_the_same_model(name):
    found = []
    for call in (lambda model: model, compiled):
        torch._dynamo.reset()
        model, x = Looped(BREAKS[name]), A.view(2, 8).clone()
        clean = model(x).item()
        with st.inject(model, "relative_gaussian:1e-6@op.matmul", allow_inert=True) as ledger:
            y = call(model)(x)
            assert y.shape == ()
            assert y.item() == pytest.approx(clean, rel=1e-4)
            y.backward()
        found.append(spots(ledger))
    assert found[1] == found[0]


@pytest.mark.parametrize("name", BREAKS)
def test_without_operators_it_does_already(name):
    model, x = Looped(BREAKS[name]), A.view(2, 8).clone()
    clean = model(x).item()
    with st.inject(model, "relative_gaussian:1e-6@module.linear") as ledger:
        assert compiled(model)(x).item() == pytest.approx(clean, rel=1e-4)
    assert ledger.forward == 2


@known("dynamo takes numpy's functions for tensors' under a mode", torch._dynamo.exc.TorchRuntimeError)
def test_a_compiled_model_may_go_through_numpy():
    model = Body(lambda a: a @ a + torch.from_numpy(a.numpy() * 2))
    clean = compiled(model)(A)
    with st.inject(model, "gain:1@op.matmul") as ledger:
        assert not torch.equal(compiled(model)(A), clean)
    assert ledger.forward == 1


# ---- 7. operators that write to an input that wants a gradient

OVER = {
    "silu": lambda: Body(lambda a: F.silu(a * 1, inplace=True)),
    "nn.SiLU": lambda: nn.Sequential(Body(lambda a: a * 1), nn.SiLU(inplace=True)),
    "addmm_": lambda: Body(lambda a: (a * 1).addmm_(a, a)),
}


@pytest.mark.parametrize("call", ["eager", "compiled"])
@pytest.mark.parametrize("name", OVER)
def test_an_operator_that_writes_to_its_input_can_be_shaken_in_training(name, call):
    model = OVER[name]()
    function = compiled(model) if call == "compiled" else model
    a = A.clone().requires_grad_()
    function(a).sum().backward()
    with st.inject(model, f"{NOISE}@op.all") as ledger:
        function(a).sum().backward()
    assert ledger.forward == 1
    assert ledger.backward > 0


# ---- 8. a head whose weight the model multiplies by itself, outside of any autograd function


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False)

    def forward(self, x):
        return F.linear(self.body(x), self.lm_head.weight)


@pytest.mark.parametrize(
    "backend",
    [
        None,
        "aot_eager",
        slow("inductor"),
        "eager",
    ],
)
def test_a_head_that_is_multiplied_by_hand_is_left_out(backend):
    model, x = ByHand(), torch.eye(4)
    clean = model(x).detach()
    with st.inject(model, "gain:1@op.matmul,direction=forward") as ledger:
        found = model(x) if backend is None else torch.compile(model, backend=backend)(x)
    assert torch.allclose(found, 2 * clean) and ledger.forward == 1


class Tied(nn.Module):
    """No module is its head: it multiplies by the weight of its embedding."""

    def __init__(self, multiply):
        super().__init__()
        self.wte, self.body, self.multiply = nn.Embedding(6, 4), nn.Linear(4, 4, bias=False), multiply

    def forward(self, ids):
        return self.multiply(self.body(self.wte(ids)), self.wte.weight)


MULTIPLIED = {
    "linear": F.linear,
    "einsum": lambda x, weight: torch.einsum("btd,vd->btv", x, weight),
    "transposed": lambda x, weight: x @ weight.T,
    "cast": lambda x, weight: F.linear(x.double(), weight.double()),
}


@pytest.mark.parametrize("call", [lambda model: model, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_head_without_a_module_is_left_out_unless_it_is_included(name, call):
    for include, fires in ((",include=lm_head", 2), ("", 1)):
        model = Tied(MULTIPLIED[name])
        with st.inject(model, f"gain:1@op.matmul,direction=forward{include}") as ledger:
            call(model)(torch.arange(6)[None])
        assert ledger.forward == fires


def run_as_it_is(graph, inputs):
    return graph.forward


def rewritten(graph, inputs):
    return torch.fx.GraphModule(graph, graph.graph)


@pytest.mark.parametrize(
    "backend", [run_as_it_is, pytest.param(rewritten, marks=known("a graph that a backend makes anew is nobody's to us"))]
)
def test_a_graph_that_a_backend_runs_with_torchs_own_functions_is_met_once(backend):
    model, x = Body(lambda x: (x @ A) @ A), torch.eye(4)
    with st.inject(model, "gain:1@op.matmul,direction=forward") as ledger:
        found = torch.compile(model, backend=backend)(x)
    assert ledger.forward == 2 and torch.equal(found, 4 * (A @ A))


def test_a_graph_that_somebody_traced_is_a_model_as_any_other():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for call in (model, torch.compile(model, backend="eager")):
        with st.inject(model, "gain:1@op.matmul,direction=forward") as ledger:
            call(torch.eye(4))
        assert ledger.forward == 1
