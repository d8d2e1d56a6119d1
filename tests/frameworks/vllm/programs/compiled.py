"""A compiled vLLM, in processes of its own, under the plan of its environment: compiled.py MODEL PLAN ANSWERS.json."""

import json
import sys

from vllm import LLM, SamplingParams

from shaketable.integrations.vllm import connect

SHAPE = {"max_model_len": 64, "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 256}
SHAPE |= {"gpu_memory_utilization": 0.1}
PROMPTS = ["12+30=", "7+8=", "99+1=", "123+456="]


def taps_in(worker):
    """How many taps the model of a worker carries."""
    hooks = [h for m in worker.get_model().modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return sum(type(h).__module__.startswith("shaketable") for h in hooks)


def compilations(worker):
    """How often dynamo has compiled anything in a worker."""
    from torch._dynamo.utils import counters

    return sum(counters["stats"].values())


class Program:
    """The engine, and everything that was asked of it."""

    def __init__(self, model):
        self.llm = LLM(model, **SHAPE)
        self.said = {}

    def ask(self, name):
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
        outputs = self.llm.generate(PROMPTS, params, use_tqdm=False)
        self.said[name] = [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]

    def refused(self, name, call):
        try:
            call()
        except Exception as error:
            self.said[name] = str(error)

    def live(self, plan):
        """Change everything that can be changed while a compiled engine lives."""
        sampler = connect(self.llm)
        self.ask("on")
        self.said["ledger"] = sampler.ledger()[0]["plan"]
        before = self.llm.collective_rpc(compilations)
        sampler.set_magnitude(0.0)
        self.ask("off")
        sampler.set_magnitude(0.3, 1)
        sampler.set_magnitude(0.6, 2)
        self.ask("second and third")
        sampler.set_plan(plan)
        self.said["asked again"] = [site["asked"] for site in sampler.ledger()[0]["plan"]["sites"]]
        self.refused("another plan", lambda: sampler.set_plan("gain:0.1@layer.0"))
        self.refused("noise on outputs", lambda: sampler.set_aqn("constant:0.1,form=output", 1))
        self.ask("still on")
        sampler.clear()
        self.ask("cleared")
        self.refused("magnitude of nothing", lambda: sampler.set_magnitude(0.5))
        sampler.set_sigma(0.2)
        self.ask("sigma")
        sampler.set_sigma(0.0)
        self.ask("no sigma")
        sampler.set_plan("gain:0.5@module.rmsnorm,point=weight")
        self.ask("weights")
        sampler.clear()
        self.ask("cleared again")
        self.said["compilations"] = [before, self.llm.collective_rpc(compilations)]


def main():
    model, plan, path = sys.argv[1:]
    program = Program(model)
    if plan == "none":
        program.ask("on")
    else:
        program.live(plan)
    program.said["taps"] = program.llm.collective_rpc(taps_in)
    with open(path, "w") as file:
        json.dump(program.said, file)


if __name__ == "__main__":
    main()
