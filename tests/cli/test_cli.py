"""The command line as its users meet it."""

import functools
import json
import subprocess
import sys

import pytest

import shaketable as shaketable_package
from tests.cli import command_server


def shaketable(*words):
    return subprocess.run([sys.executable, "-m", "shaketable", *words], capture_output=True, text=True, timeout=120)


@pytest.fixture
def inspect(tmp_path):
    return functools.partial(command_server.shaketable, tmp_path, "inspect")


QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def qwen(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return str(path)


@pytest.mark.slow
def test_inspect_reproduces_the_origin_s_table(inspect, qwen, tmp_path):
    done = inspect(qwen, "--json", str(tmp_path / "out.json"))
    assert done.code == 0, done.stderr
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["layers"] == 28
    assert not facts["moe"]
    assert facts["roles"]["rmsnorm"]["count"] == 57
    assert facts["roles"]["linear"]["count"] + facts["roles"]["lm_head"]["count"] == 197
    targets = facts["targets"]
    assert [targets[k]["count"] for k in targets] == [57, 85, 197, 254]
    assert targets["rmsnorm"]["flops_share"] < 0.01
    assert 0.94 < targets["linear + lm_head"]["flops_share"] < 0.98
    assert facts["parameters"] == pytest.approx(1.54e9, rel=0.01)
    assert "57" in done.stdout


def test_inspect_shows_exactly_what_a_plan_would_hit(inspect, qwen, tmp_path):
    plan = "mxfp4@module.mlp.down_proj,layers=3;relative_gaussian:0.1@op.matmul,layers=0-1;gain:1@layer.27"
    done = inspect(qwen, "--plan", plan, "--json", str(tmp_path / "out.json"))
    assert done.code == 0, done.stderr
    sites = json.loads((tmp_path / "out.json").read_text())["sites"]
    assert sites[0]["modules"] == ["model.layers.3.mlp.down_proj:weight", "model.layers.3.mlp.down_proj:input"]
    assert (sites[1]["families"], sites[1]["layers"]) == (["matmul"], 2)
    assert sites[2]["modules"] == ["model.layers.27:output"]
    assert "model.layers.3.mlp.down_proj:weight" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["smollm"], "did you mean 'smollm2-135m'"),
        (["smollm2-135m", "--plan", "gain:1@layer.40"], "layers 0-29"),
        (["smollm2-135m", "--plan", "gain:1@module.lineer"], "did you mean 'linear'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(inspect, words, expected):
    done = inspect(*words)
    assert done.code == 2
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_env(tmp_path):
    done = shaketable("env", "--json", str(tmp_path / "env.json"))
    assert done.returncode == 0
    facts = json.loads((tmp_path / "env.json").read_text())
    assert facts["noise kernels"] in ("native", "torch")
    assert facts["torch"].startswith("2.")


def test_version_answers_without_torch():
    program = "import sys; sys.argv = ['shaketable', '--version']\nfrom shaketable.cli import main\n"
    program += "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["shaketable", shaketable_package.__version__, "0", "False"]


def test_a_command_of_the_origin_is_answered_with_the_one_to_use():
    done = shaketable("run", "--", "bash", "scripts/test_noisy_ops_a100.sh", "1e-4", "8")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("GPUS=8 PLAN=relative_gaussian:0.0001@op.matmul bash examples/verl/operator_noise.sh")
    done = shaketable("run", "--", "python", "train.py")
    told = "error: no plan; write: shaketable run --plan PLAN -- python train.py, or give verl +shaketable.plan=PLAN\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("verb", ["train", "study"])
def test_variables_of_the_origin_are_not_passed_over(verb, monkeypatch):
    monkeypatch.setenv("VERL_NOISY_OPS_ENABLED", "1")
    monkeypatch.setenv("VERL_NOISY_OPS_SCALE", "5e-2")
    done = shaketable(verb, *(["list"] if verb == "study" else ["nano", "--task", "arithmetic"]))
    assert done.returncode == 2
    assert "unset them and write --plan relative_gaussian:0.05@op.matmul" in done.stderr
    assert len(done.stderr.splitlines()) == 1
