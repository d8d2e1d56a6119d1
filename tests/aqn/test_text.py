"""AQN as a line of text and as a file."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

import shaketable as st
from shaketable.errors import ShaketableError

sigma = some.floats(min_value=1e-12, max_value=1e6)
falling = some.tuples(sigma, sigma).map(lambda pair: (max(pair), min(pair)))
schedules = some.one_of(
    some.builds(lambda ends, k: st.GlobalDecay(*ends, stages=k), falling, some.integers(3, 50)),
    some.lists(falling, min_size=1, max_size=4).map(st.EpochAware),
    some.floats(0, 1e6).map(st.Constant),
)
factor = some.floats(0, 100)


@some.composite
def every_aqn(draw):
    layers = draw(some.none() | some.sets(some.integers(0, 40), min_size=1))
    named = some.sampled_from(sorted(layers)) if layers else some.integers(0, 40)
    form = draw(some.sampled_from(["weight", "output"]))
    roles = some.lists(some.sampled_from(["rmsnorm", "layernorm", "linear"]), min_size=1, max_size=3, unique=True)
    return st.AQN(
        draw(schedules),
        unit=draw(some.sampled_from(["relative", "absolute"])),
        form=form,
        roles=("rmsnorm",) if form == "output" else draw(roles),
        layers=layers and sorted(layers),
        multipliers=draw(some.dictionaries(named, factor, max_size=4)),
        zones=draw(some.booleans()),
        where=draw(some.sampled_from(["rollout", "both"])),
        seed=draw(some.integers(-(2**63), 2**64 - 1)),
    )


@given(every_aqn())
def test_text_reads_back(aqn):
    assert st.AQN.load(aqn.text()) == aqn
    assert st.AQN.load(aqn) is aqn


LINES = {
    "global_decay:0.05-0.0005,stages=10": st.AQN(st.GlobalDecay(0.05, 0.0005, stages=10)),
    "epoch_aware:0.05-0.01+0.01-0.0005": st.AQN(st.EpochAware([(0.05, 0.01), (0.01, 0.0005)])),
    "epoch_aware:0.04-0.01,epochs=2": st.AQN(st.EpochAware([(0.04, 0.02), (0.02, 0.01)])),
    "constant:0.01,form=output,layers=15,where=both,unit=absolute": st.AQN(
        st.Constant(0.01), form="output", layers=[15], where="both", unit="absolute"
    ),
    "constant:1,roles=rmsnorm+linear,multipliers=0:2+27:0.5,zones=on,seed=7": st.AQN(
        st.Constant(1), roles=("rmsnorm", "linear"), multipliers={0: 2, 27: 0.5}, zones=True, seed=7
    ),
    " constant:0.01 , layers=0+4-6, zones=edge:0.25+middle:0.5+after:0.5 ": st.AQN(
        st.Constant(0.01), layers=[0, 4, 5, 6], zones=True
    ),
    "linear_decay:0.05-0,unit=absolute": st.AQN(st.LinearDecay(0.05, 0.0), unit="absolute"),
}


@pytest.mark.parametrize("line", LINES)
def test_lines(line):
    assert st.AQN.load(line) == LINES[line]


ERRORS = {
    "gobal_decay:0.05-0.0005": "did you mean 'global_decay'",
    "global_decay": "write e.g. global_decay:0.05-0.0005,stages=10",
    "global_decay:0.05-nan": "are not the σ of global_decay",
    "global_decay:0.0005-0.05": "ends at or below its start",
    "global_decay:0.05-0.0005,stages=2": "stages",
    "global_decay:0.05-0.0005,stagse=4": "did you mean 'stages'",
    "constant:0.05,stages=4": "unknown key for constant 'stages'",
    "constant:0.05,layers": "'layers' in .* is not key=value",
    "constant:0.05,seed=99999999999999999999": "seed .* has more than 64 bits",
    "constant:0.05,multipliers=3": "is not LAYER:FACTOR",
    "constant:0.05,zones=edge:0.1": "zones are on, or left out",
    "constant:0.05,form=output,roles=linear": "roles are for form=weight",
    "constant:0.05,layers=0-1,multipliers=3:2": "multipliers name layer 3, which layers=0-1 leaves out",
    "constant:-1": "'-1' are not the σ of constant; write e.g. constant:0.01",
    "epoch_aware:0.05-0.01,epochs=0": "at least one epoch",
    "": "unknown schedule ''",
    "nothing.yaml": "cannot read the AQN file nothing.yaml",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_one_line_with_what_is_valid(line):
    with pytest.raises(ShaketableError, match=ERRORS[line]) as error:
        st.AQN.load(line)
    assert "\n" not in str(error.value)


def written(tmp_path, text):
    path = tmp_path / "aqn.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


GUIDED = """
aqn:
  enabled: true
  layer_specific: true
  base_sigma: 0.04
  layer_sigmas: {1: 0.04, 3: 0.06, 2: 0.02}
  schedule: epoch_aware
  high_priority_layers: [3]
metadata: {layers: 4}
"""


def test_a_guided_file_gives_no_noise_to_layers_it_does_not_name(tmp_path, tiny_llama):
    aqn = st.AQN.load(written(tmp_path, GUIDED))
    assert aqn.schedule == st.EpochAware([(0.04, 0.008), (0.008, 0.0004)]) and st.AQN.load(aqn.text()) == aqn
    noise = aqn.attach(tiny_llama, 10)
    assert "model.norm:weight" not in noise.modules_hit
    for step in range(10):
        noise.step = step
        base = aqn.schedule.sigma(step, 10)
        assert noise.sigmas == pytest.approx({1: base, 2: base * 0.02 / 0.04, 3: base * 0.06 / 0.04})


def scanned(sigmas, layers=28):
    """`aqn_config.yaml` as the origin's `generate_training_config` returned it."""
    high = [layer for layer, sigma in sigmas.items() if sigma > 0.06]
    aqn = {"enabled": True, "layer_specific": True, "base_sigma": 0.05, "layer_sigmas": sigmas, "schedule": "epoch_aware"}
    return {
        "aqn": {**aqn, "high_priority_layers": high},
        "srdd_metadata": {"num_layers": layers, "analysis_date": "2026-01-07"},
    }


def test_the_origins_own_file_is_read_and_means_what_its_trainer_did(tmp_path):
    """Noise on what layers return, sampling and training; a layer without a σ of its own has the base."""
    every = dict.fromkeys(range(28), 0.05) | {10: 0.075, 15: 0.1, 22: 0.075}
    aqn = st.AQN.load(written(tmp_path, scanned(every)))
    assert (aqn.form, aqn.where, aqn.unit) == ("output", "both", "relative")
    assert aqn.schedule == st.EpochAware([(0.05, 0.01), (0.01, 0.0005)])
    assert (aqn.layers, aqn.multipliers) == (tuple(range(28)), {10: 1.5, 15: 2.0, 22: 1.5})
    some = {"10": 0.075, "15": 0.1, "22": 0.075}
    assert st.AQN.load(written(tmp_path, scanned({int(k): v for k, v in some.items()}))) == aqn
    assert st.AQN.load(aqn.text()) == aqn


def test_what_guide_writes_is_read(tmp_path):
    from shaketable.aqn.guidance import Guidance

    probes = [{"layer": i, "statistics": {"gain": g, "kurtosis": 800.0, "instability": 0.0}} for i, g in enumerate((1, 0.5, 1))]
    diagnosis = {"schema": 1, "kind": "diagnosis", "model": "m", "device": "d", "date": "x", "num_layers": 3, "probes": probes}
    found = Guidance.of(
        diagnosis | {"verdict": "HEALTHY", "layer": None, "fault_class": None}, base_sigma=0.02, schedule="global_decay"
    )
    aqn = st.AQN.load(written(tmp_path, found.to_yaml()))
    assert aqn.schedule == st.GlobalDecay(0.02, 0.0002)
    groups = {layer: aqn.sigma(g, 11, 100) for g in aqn.groups(3) for layer in g.layers}
    assert groups == pytest.approx({x.layer: x.sigma for x in found.layers})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("enabled: true", "enabled: false", "enabled and layer_specific must be true"),
        ("base_sigma: 0.04", "base_sgma: 0.04", "did you mean 'base_sigma'"),
        ("{1: 0.04, 3: 0.06, 2: 0.02}", "{1: -0.04}", "layer_sigmas: 1 must be a number of 0 or more"),
    ],
)
def test_a_guided_file_that_is_wrong(tmp_path, old, new, message):
    assert old in GUIDED
    with pytest.raises(ShaketableError, match=message):
        st.AQN.load(written(tmp_path, GUIDED.replace(old, new)))


def test_other_files_that_are_wrong(tmp_path):
    for text, message in {"- 1": "is not one of `shaketable guide`", "schedule: [": "is not YAML"}.items():
        with pytest.raises(ShaketableError, match=message):
            st.AQN.load(Path(written(tmp_path, text)))
