"""Small inputs that once cost much: each is one clear line now, soon, and in little memory."""

import cProfile

import pytest
from torch import nn

import shaketable as st
from shaketable.errors import ShaketableError
from shaketable.io.yaml_file import read_yaml
from shaketable.study.file import load_study

pytestmark = [
    pytest.mark.attack("hostile inputs"),
    pytest.mark.timeout(120),
]  # a second each, where they took minutes or for ever


def refused(function, *arguments):
    with pytest.raises(ShaketableError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert len(text) < 2100
    assert "\n" not in text
    return text


def written(folder, text):
    path = folder / "file.yaml"
    path.write_text(text)
    return path


def test_many_keys_are_compared_once(tmp_path):
    keys = "".join(f"k{i}: 1\n" for i in range(30_000))
    assert "k29999 is given twice" in refused(read_yaml, written(tmp_path, f"{keys}k29999: 2\n"), "the file")


def test_many_seeds_are_compared_once(tmp_path):
    seeds = ", ".join(map(str, [*range(50_000), 7]))
    text = f"study: s\nmodel: nano\ntask: arithmetic\narms: {{a: {{}}}}\nseeds: [{seeds}]\n"
    assert "nor a list of different ones" in refused(load_study, written(tmp_path, text))


class CountedLinear(nn.Linear):
    """A linear that counts how often it is compared with another module."""

    compared = 0

    def __eq__(self, other):
        CountedLinear.compared += 1
        return self is other

    def __hash__(self):
        return id(self)


class Attention(nn.ModuleDict):
    """Known by its name."""


def stack(layers):
    """A model with attention and MLP parts, each of two linears."""

    def pair():
        return {name: CountedLinear(2, 2) for name in ("a_proj", "b_proj")}

    blocks = [nn.ModuleDict({"attention": Attention(pair()), "mlp": nn.ModuleDict(pair())}) for _ in range(layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


def calls(layers, plan):
    """Function calls and comparisons that attaching, hooking and closing take."""
    model, profile = stack(layers), cProfile.Profile()
    CountedLinear.compared = 0
    injection = profile.runcall(st.inject, model, plan, allow_inert=True)
    profile.runcall(injection.enable)
    profile.runcall(injection.close)
    return sum(row.callcount for row in profile.getstats()) + CountedLinear.compared


@pytest.mark.parametrize(
    "plan", ["module.linear", "module.linear+mlp,point=input", "module.linear,point=weight", "op.all", "layer.all"]
)
def test_attaching_is_linear_in_the_number_of_layers(plan):
    calls(2, f"gain:0.1@{plan}")
    few, many = (calls(n, f"gain:0.1@{plan}") for n in (40, 160))
    assert many / few < 4.5
