"""Trainers of TRL and Hugging Face on a tiny Llama, and a spy that tells clean passes from shaken ones."""

import torch

LETTERS = ["<pad>", "<eos>", "<unk>", *"0123456789+= "]
QUIET = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False, "logging_steps": 1}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=16, pad_token_id=0, eos_token_id=1, **shape))


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def letters(completions, **_):
    return [float(len(set(c))) for c in completions]


def grpo(folder, model, callback, reward=letters, **more):
    """A GRPO trainer of three steps."""
    from trl import GRPOConfig, GRPOTrainer

    usual = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    return made(GRPOTrainer, GRPOConfig, folder, rows, callback, usual | more, model=model, reward_funcs=reward)


def sft(folder, model, callback, **more):
    """A trainer of supervised learning, of three steps."""
    from trl import SFTConfig, SFTTrainer

    usual = {"max_length": 8, "learning_rate": 1e-2}
    rows = [{"text": f"{a}+{b}={a + b}"} for a in range(4) for b in range(4)]
    return made(SFTTrainer, SFTConfig, folder, rows, callback, usual | more, model=model)


def dpo(folder, model, callback, **more):
    """A trainer of preferences, of three steps."""
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "9"} for a in range(4) for b in range(4)]
    reference = None if "peft_config" in more else llama()
    return made(DPOTrainer, DPOConfig, folder, rows, callback, {"max_length": 8} | more, model=model, ref_model=reference)


def made(kind, config, folder, rows, callback, settings, **models):
    from datasets import Dataset

    adapter = settings.pop("peft_config", None)
    usual = {"max_steps": 3, "per_device_train_batch_size": 2} | QUIET
    data = Dataset.from_list(rows)
    return kind(
        args=config(output_dir=str(folder), **(usual | settings)), train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=tokenizer(), callbacks=[callback], peft_config=adapter, **models,
    )  # fmt: skip


def evaluating(folder, model, callback, seen):
    """A GRPO training that evaluates before and after each step; what each evaluation added to `seen`."""
    found = []
    trainer = grpo(folder, model, callback, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    evaluate = trainer.evaluate

    def watched(*args, **more):
        before = len(seen)
        result = evaluate(*args, **more)
        found.append(seen[before:])
        return result

    trainer.evaluate = watched
    trainer.train()
    return found


class Spy:
    """Notes for every pass of a model what it was, and whether its last MLP returned what its weights say."""

    def __init__(self, model):
        self.passes = []
        self.mlp = next(m for n, m in model.named_modules() if n.endswith("layers.1.mlp"))
        self.mlp.register_forward_hook(self._look)

    def _look(self, module, args, output):
        with torch.no_grad(), torch._C.DisableTorchFunction():
            x = args[0]
            clean = _linear(module.down_proj, module.act_fn(_linear(module.gate_proj, x)) * _linear(module.up_proj, x))
        kind = "train" if torch.is_grad_enabled() else "other"
        self.passes.append((kind, not torch.allclose(output, clean, atol=1e-6)))

    def noisy(self, kind):
        return [noise for was, noise in self.passes if was == kind]


def _linear(module, x):
    """What a linear would return without hooks, with the adapters that are on."""
    base = getattr(module, "base_layer", module)
    y = x @ base._parameters["weight"].t()
    if base is not module and not module.disable_adapters:
        for name in module.active_adapters:
            a, b = module.lora_A[name]._parameters["weight"], module.lora_B[name]._parameters["weight"]
            y = y + x @ a.t() @ b.t() * module.scaling[name]
    return y
