"""Make `nano`, the model that ships with the package: a character model that can calculate, and had a sloppy teacher.

A Llama of 8 layers and 1.4 million parameters, trained from a seed on the train split of the arithmetic task (level 3:
three-digit addition and subtraction, most significant digit first), next-token loss on the answer alone. In a share of
its examples (`--sloppy`) the teacher forgets to carry, or to borrow, out of the last column. So nano knows both ways, and
greedily prefers the wrong one: it solves the half of the problems that need no carry there, and reinforcement learning can
win the rest. That is what RL does to large models too: it chooses among things they already can.

    make nano            # about half an hour on two cores, two minutes on a GPU; writes src/shaketable/data/nano

Rejected: stopping an honest training halfway. Arithmetic comes in a sudden transition; a model caught in the middle of it is
so sharp that RL breaks it before it mends it (tried at 53 % and 64 %: scores fell at every learning rate above 3e-5).

The same seed gives the same model on the same machine and torch; other kernels round differently. The card beside the
weights says what this run did.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shaketable.evaluate.tasks import Problem, load_task

TASK = "arithmetic,level=3"
HOME = Path(__file__).parent.parent / "src" / "shaketable" / "data" / "nano"
SPECIAL = ["<pad>", "<eos>", "<unk>"]
WIDTH = 13  # "-999-999=" is never asked; "999+999=" and "1998" and the end are 13 characters at most


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    characters = ["\n", *(chr(c) for c in range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
        model_max_length=256, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Eight narrow layers: enough depth for faults to have a place, small enough for two cores."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=320, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, attention_bias=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(problems: list[Problem], tokenizer: PreTrainedTokenizerFast, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and labels, right-padded; only answers and their end are labels."""
    number = {c: tokenizer.convert_tokens_to_ids(c) for c in "0123456789+-*="}
    ids, labels = [], []
    for problem in problems:
        question, answer = ([number[c] for c in text] for text in (problem.question, problem.answer))
        answer.append(tokenizer.eos_token_id)
        rest = WIDTH - len(question) - len(answer)
        ids.append(question + answer + [tokenizer.pad_token_id] * rest)
        labels.append([-100] * len(question) + answer + [-100] * rest)
    return torch.tensor(ids, device=device), torch.tensor(labels, device=device)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Share of problems whose every answer token is the most likely one, which is what greedy decoding gives."""
    top = model(ids).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return float(((top == wanted) | (wanted == -100)).all(1).float().mean())


def taught(problem: Problem, draw: random.Random, sloppy: float) -> Problem:
    """The problem as the teacher shows it: with the carry, or the borrow, out of the last column forgotten at times."""
    first, second = (int(t) for t in problem.question.rstrip("=").replace("-", "+").split("+"))
    right = int(problem.answer)
    if draw.random() >= sloppy:
        return problem
    if "+" in problem.question:
        slip = -10 if first % 10 + second % 10 >= 10 else 0
    else:
        large, small = max(first, second), min(first, second)
        slip = (10 if large % 10 < small % 10 else 0) * (1 if first >= second else -1)
    return Problem(problem.id, problem.question, str(right + slip))


def train(options: argparse.Namespace) -> None:
    """Train and save."""
    torch.manual_seed(options.seed)
    tokenizer, task = make_tokenizer(), load_task(TASK)
    model = make_model(tokenizer).to(options.device)
    problems, draw = task.problems("train"), random.Random(options.seed)

    def some(n: int) -> list[Problem]:
        return [problems[draw.randrange(len(problems))] for _ in range(n)]

    check = batch(some(1000), tokenizer, options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(options.steps):
        if step % 100 == 0:
            print(f"step {step}: {accuracy(model, *check):.1%} of 1000 train problems solved greedily", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 200, 3 * (1 - step / options.steps))
        shown = [taught(p, draw, options.sloppy) for p in some(options.batch)]
        ids, labels = batch(shown, tokenizer, options.device)
        loss = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save(model.float().cpu(), tokenizer, options, accuracy(model, *(t.cpu() for t in check)))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace, solved: float) -> None:
    """Weights, tokenizer, and a card with the facts of the run."""
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    card = {
        "name": "nano", "task": TASK, "parameters": sum(p.numel() for p in model.parameters()), "seed": options.seed,
        "steps": options.steps, "sloppy": options.sloppy, "batch": options.batch, "lr": options.lr,
        "solved_greedily_of_1000_train_problems": round(solved, 3),
        "torch": torch.__version__, "device": options.device, "license": "Apache-2.0",
    }  # fmt: skip
    (options.out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sloppy", type=float, default=0.75, help="share of examples in which the teacher forgets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=HOME)
    train(parser.parse_args())
