"""Foreign code in models of a few modules: every way in which it comes, and the words for it."""

import functools
import sys
import types
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shaketable.locate.capture import foreign_code as code_of
from shaketable.locate.capture.recorder import Record, Recording
from shaketable.locate.capture.reference import Reference


class Mlp(nn.Module):
    """What a config makes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 2)

    def forward(self, x):
        return self.up(x)


class Small(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.mlp, self.more = Mlp(), nn.Sequential(Mlp(), nn.Linear(2, 2))

    def forward(self, x):
        return self.more(self.mlp(x))

    @classmethod
    def _from_config(cls, config):
        return cls(config)


def small():
    return Small(SimpleNamespace(_attn_implementation="sdpa"))


def named(change=lambda made: None):
    made = small()
    reference = Reference(made)
    change(made)
    return code_of.foreign_code(made, reference)


def louder(mod, args, output):
    return output * 2


def quieter(mod, args):
    return None


def of_home(code, home):
    """The same code in a module of another name."""
    return FunctionType(code.__code__, {"__name__": home, "__builtins__": __builtins__}, code.__name__)


def test_a_model_as_its_config_makes_it_has_none():
    assert named() == []


# ---- hooks


class Callable:
    def __call__(self, mod, args, output):
        return None


@pytest.mark.parametrize(("path", "where"), [("", "the model"), ("mlp", "mlp"), ("more", "more"), ("more.0", "more.0")])
def test_hooks_of_a_composite_module_are_named_those_before_first(path, where):
    def change(made):
        made.get_submodule(path).register_forward_hook(louder)
        made.get_submodule(path).register_forward_pre_hook(quieter)

    assert named(change) == [f"the hook quieter of {where}", f"the hook louder of {where}"]


def test_a_hook_is_named_by_its_function_or_by_its_class():
    def change(made):
        for hook in (functools.partial(functools.partial(louder)), Callable(), Callable().__call__):
            made.mlp.register_forward_hook(hook)

    assert named(change) == [f"the hook {name} of mlp" for name in ("louder", "Callable", "__call__")]


@pytest.mark.parametrize("path", ["mlp.up", "more.1"])
def test_hooks_and_a_forward_of_an_operator_are_judged_and_not_named(path):
    def change(made):
        made.get_submodule(path).register_forward_hook(louder)
        made.get_submodule(path).register_forward_pre_hook(quieter)
        made.get_submodule(path).forward = lambda x: x

    assert named(change) == []


@pytest.mark.parametrize(
    ("home", "found"),
    [
        ("transformers.utils.output_capturing", []), ("torch._dynamo.eval_frame", []), ("torch._dynamo", ["the hook louder of mlp"]),
        ("transformers.utils", ["the hook louder of mlp"]), ("mine", ["the hook louder of mlp"]),
    ],
)  # fmt: skip
def test_hooks_that_collect_hidden_states_are_left_out(home, found):
    assert named(lambda made: made.mlp.register_forward_hook(of_home(louder, home))) == found


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_all_modules_are_named_once(register):
    handle = register(louder if register is register_module_forward_hook else quieter)
    try:
        found = named()
    finally:
        handle.remove()
    assert found == [f"the hook {'louder' if register is register_module_forward_hook else 'quieter'} of all modules"]
    assert named() == []


# ---- methods and classes


@pytest.mark.parametrize("name", ["forward", "_call_impl"])
@pytest.mark.parametrize(("path", "where"), [("", "the model"), ("more.0", "more.0")])
def test_a_method_of_its_own_is_named(name, path, where):
    assert named(lambda made: setattr(made.get_submodule(path), name, lambda x: x)) == [f"a {name} of its own in {where}"]


def test_what_is_put_around_the_call_of_an_operator_is_named():
    assert named(lambda made: setattr(made.mlp.up, "_call_impl", lambda x: x)) == ["a _call_impl of its own in mlp.up"]


class Other(Mlp):
    pass


def test_another_class_is_named_with_the_one_that_the_config_makes():
    assert named(lambda made: setattr(made.more[0], "__class__", Other)) == ["more.0 is a Other where the config makes a Mlp"]


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl"])
def test_a_method_from_elsewhere_is_named_once_with_its_home(monkeypatch, name):
    made = small()
    reference = Reference(made)
    monkeypatch.setattr(Mlp, name, of_home(louder, "elsewhere.patches"), raising=False)
    assert code_of.foreign_code(made, reference) == [f"Mlp.{name}, which is from elsewhere.patches"]


def test_a_method_that_torch_itself_gives_to_all_modules_is_named_when_it_was_replaced(monkeypatch):
    made = small()
    reference = Reference(made)
    monkeypatch.setattr(nn.Module, "_call_impl", of_home(louder, "elsewhere"))
    assert code_of.foreign_code(made, reference) == ["Module._call_impl, which is from elsewhere"]


def test_a_wrapper_that_dynamo_makes_is_passed_over():
    def change(made):
        kind = type("OptimizedModule", (Mlp,), {"__module__": "torch._dynamo.eval_frame"})
        made.mlp.__class__ = kind
        made.mlp.register_forward_hook(louder)

    assert named(change) == []


# ---- functions that a model calls by name


def helper(x):
    return x


def test_a_function_in_the_models_own_file_is_named_when_it_is_from_elsewhere(monkeypatch):
    here = Small.__module__
    fake = types.ModuleType(here)
    fake.helper, fake.other = helper, of_home(helper, "elsewhere.deep")
    fake.number, fake.kind = 3, Mlp
    monkeypatch.setitem(sys.modules, here, fake)
    assert named() == [f"{here.rpartition('.')[2]}.other, which is from elsewhere.deep"]


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [(torch, "relu", "torch"), (torch.nn.functional, "linear", "torch.nn.functional"), (torch.Tensor, "add", "torch.Tensor")],
)
def test_a_function_of_torch_is_named_when_it_was_replaced(monkeypatch, owner, name, where):
    made = small()
    reference = Reference(made)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, of_home(helper, "elsewhere"))
        found = code_of.foreign_code(made, reference)
    assert found == [f"{where}.{name}, which is from elsewhere"]


@pytest.mark.parametrize("used", [True, False])
def test_the_attention_that_the_config_names_is_looked_at_and_no_other(monkeypatch, used):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = "sdpa" if used else "flash_attention_2"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, of_home(helper, "elsewhere"))
    assert named() == (["attention.sdpa, which is from elsewhere"] if used else [])


@pytest.mark.parametrize("config", [None, SimpleNamespace(), SimpleNamespace(_attn_implementation={"": "sdpa"})])
def test_a_config_that_names_no_attention_has_none(config):
    made = Small(config)
    assert code_of.foreign_code(made, Reference(made)) == []


def test_everything_is_told_once_and_in_order(monkeypatch):
    def change(made):
        made.register_forward_hook(louder)
        made.more[0].register_forward_hook(louder)
        made.mlp.register_forward_hook(louder)
        made.mlp.register_forward_hook(louder)

    monkeypatch.setattr(Mlp, "forward", of_home(louder, "elsewhere"))
    assert named(change) == [
        "the hook louder of the model", "the hook louder of mlp", "Mlp.forward, which is from elsewhere", "the hook louder of more.0",
    ]  # fmt: skip


# ---- where code is from


@pytest.mark.parametrize(
    ("found", "home", "own"),
    [
        ("mine", "mine", True), ("mine.deep", "mine.other", True), ("mine", "yours", False), ("mine2", "mine", False),
        ("torch.nn", "mine", True), ("transformers.models.x", "mine", True), ("accelerate.hooks", "mine", True),
        ("safetensors", "mine", True), ("typing_extensions", "mine", True), ("functools", "mine", True), ("collections.abc", "mine", True),
        ("mine", "torch", False), ("shaketable.x", "torch", False),
    ],
)  # fmt: skip
def test_code_is_of_a_package_or_of_what_every_package_uses(found, home, own):
    assert code_of._is_of(of_home(helper, found), home) is own


def lying(code, home):
    """Code that says that it is torch's."""
    made = of_home(code, home)
    made.__module__ = "torch.nn"
    return made


class Owner:
    def method(self):
        return None


@pytest.mark.parametrize(
    ("code", "home"),
    [
        (helper, __name__), (functools.partial(functools.partial(of_home(helper, "there"))), "there"), (Owner().method, __name__),
        (functools.wraps(torch.relu)(of_home(helper, "hidden")), "hidden"), (len, "builtins"), (Owner(), __name__),
        (torch.Tensor.add, "nowhere"), (staticmethod(lying(helper, "hidden")), "hidden"),
    ],
)  # fmt: skip
def test_the_home_of_code_is_read_off_its_globals(code, home):
    assert code_of._home(code) == home


def test_what_has_globals_without_a_name_is_told_by_its_module():
    code = FunctionType(helper.__code__, {"__builtins__": __builtins__})
    code.__module__ = "said"
    assert code_of._home(code) == "said"
    code.__module__ = None
    assert code_of._home(code) == "nowhere"


@pytest.mark.parametrize(
    ("code", "name"), [(helper, "helper"), (functools.partial(helper), "helper"), (Owner(), "Owner"), (Owner, "Owner")]
)
def test_code_has_a_name_or_its_class_has(code, name):
    assert code_of._name(code) == name


def test_only_functions_count_as_replaced():
    names = {"a": of_home(helper, "x"), "b": helper, "c": 3, "d": Owner, "e": None, "f": len, "g": of_home(helper, "y.z")}
    here = __name__.partition(".")[0]
    assert list(code_of._replaced("place", names, here)) == ["place.a, which is from x", "place.g, which is from y.z"]


# ---- tensors from nowhere


def entry(path, func=None, strangers=("0",)):
    return Record(path, func, (), {}, torch.ones(1), strangers)


@pytest.mark.parametrize(
    ("prefix", "record", "said"),
    [
        ("", entry("mlp.up"), ["mlp.up was given values that no operator made"]),
        ("layers.1", entry("mlp", torch.add), ["layers.1.mlp was given values that no operator made (add)"]),
        ("layers.1", entry("", torch.mul), ["layers.1 was given values that no operator made (mul)"]),
        ("", entry(""), ["the model was given values that no operator made"]),
        ("layers.1", entry("mlp", torch.add, ()), []),
    ],
)
def test_values_that_no_operator_made_are_told_with_who_took_them(prefix, record, said):
    recording = Recording([entry("a", strangers=()), record, entry("b", strangers=())])
    assert list(code_of.unmade(recording, prefix) if prefix else code_of.unmade(recording)) == said


def test_every_operator_that_was_given_some_is_told():
    found = list(code_of.unmade(Recording([entry("a"), entry("b", torch.add), entry("a")])))
    assert [line.partition(" ")[0] for line in found] == ["a", "b", "a"]
