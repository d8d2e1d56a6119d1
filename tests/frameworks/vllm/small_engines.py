"""Small models in vLLM, and the same models in transformers as the oracle."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import shaketable
from shaketable.integrations.vllm import connect, options

NANO = Path(shaketable.__file__).parent / "data" / "nano"
START = "relative_gaussian:0.05@module.linear"
"""The plan that the shared engine starts with."""
PROMPTS = ("12+30=", "7+8=", "99+1=", "123+456=")
SHAPE = {"max_model_len": 64, "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 32}
SHAPE |= {"gpu_memory_utilization": 0.1}


_alive = []


class Engine:
    """vLLM in this process, and what a test wants to know of it.

    vLLM keeps its parallel groups, of one rank each, for the whole process. A mixture of experts needs one more than the
    engine before it had, and an engine that is collected takes the groups of all others with it.
    """

    def __init__(self, model, **kwargs):
        from vllm import LLM
        from vllm.distributed.parallel_state import destroy_model_parallel

        destroy_model_parallel()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.llm = LLM(str(model), enforce_eager=True, **(SHAPE | kwargs))
        self.sampler = connect(self.llm)
        _alive.append(self.llm)

    def __getattr__(self, name):
        return getattr(self.sampler, name)

    def clear(self):
        """As if it had been started without instructions, at step 0."""
        self.sampler.clear()
        self.sampler.set_phase("rollout")
        self.sampler.set_step(0)

    @property
    def worker(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def model(self):
        return self.worker.get_model()

    @property
    def tokenizer(self):
        return self.llm.get_tokenizer()

    def weights(self):
        """Every parameter, copied."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def ask(self, prompts=PROMPTS, tokens=8):
        """Token ids that greedy decoding adds to each prompt, and the log-probabilities of each prompt's own tokens."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=0, logprobs=0)
        outputs = self.llm.generate(_as_ids(self, prompts), params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs], [_prompt_logprobs(o) for o in outputs]

    def norms(self):
        """The weights of all norms, copied."""
        return {name: value for name, value in self.weights().items() if "norm" in name}

    def report(self):
        """What its one worker says."""
        (report,) = self.sampler.ledger()
        return report

    def site(self, what="plan", clause=0):
        """The ledger of one clause."""
        return self.report()[what]["sites"][clause]

    def spots(self, what="plan"):
        """Fires per spot, of all clauses."""
        found = {}
        for site in self.report()[what]["sites"]:
            for name, spot in site["spots"].items():
                found[name] = found.get(name, 0) + sum(forward for forward, _ in spot["counts"].values())
        return found


def same(a, b):
    """Whether two dictionaries, or lists, of tensors are the same bit for bit."""
    keys = range(len(a)) if isinstance(a, list) else a.keys()
    return len(a) == len(b) and all(torch.equal(a[k], b[k]) for k in keys)


def apart(a, b):
    """The largest difference between two lists of tensors."""
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def share_within(tolerance, a, b):
    """The share of numbers that agree. A format on activations has steps: the last bit of a number may send it to the next."""
    near = torch.cat([(x - y).abs() < tolerance for x, y in zip(a, b, strict=True)])
    return float(near.float().mean())


def start(model, *, aqn=None, plan=None, ledger=None, **kwargs):
    """An engine with instructions."""
    instructions = options(plan=plan, aqn=aqn, ledger=ledger) if plan or aqn else {}
    return Engine(NANO if model == "nano" else model, **instructions, **kwargs)


def _as_ids(engine, prompts):
    if isinstance(prompts[0], str):
        prompts = [engine.tokenizer(p)["input_ids"] for p in prompts]
    return [{"prompt_token_ids": list(ids)} for ids in prompts]


def _prompt_logprobs(output):
    ids = output.prompt_token_ids
    return torch.tensor([entry[ids[i]].logprob for i, entry in enumerate(output.prompt_logprobs) if entry is not None])


class Oracle:
    """The same model in transformers."""

    def __init__(self, model):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(NANO)

    def ask(self, prompts, tokens=8):
        """What `Engine.ask` says."""
        found = [self._decode(ids, tokens) for ids in prompts]
        return [new for new, _, _ in found], [prompt for _, prompt, _ in found]

    def answer(self, prompts, tokens=8):
        """What vLLM says of prompts in words: the tokens, and the log-probability of all of them."""
        found = [self._decode(self.tokenizer(prompt)["input_ids"], tokens) for prompt in prompts]
        return [(new, sum(chosen)) for new, _, chosen in found]

    @torch.no_grad()
    def _decode(self, prompt, tokens):
        """Greedy, one token at a time and without a cache: new tokens, log-probabilities of the prompt's and of theirs."""
        ids, new, own, chosen = list(prompt), [], None, []
        end = self.model.config.eos_token_id
        while len(new) < tokens and (not new or new[-1] != end):
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            own = logprobs[range(len(ids) - 1), ids[1:]] if own is None else own
            new.append(int(logprobs[-1].argmax()))
            chosen.append(float(logprobs[-1, new[-1]]))
            ids.append(new[-1])
        return new, own, chosen
