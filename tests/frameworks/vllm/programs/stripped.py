"""A worker in which somebody takes the hooks off again: stripped.py MODEL PLAN."""

import sys

from vllm import LLM, SamplingParams

from shaketable.integrations.vllm import options
from shaketable.integrations.vllm.extension import Extension


class Stripping(Extension):
    """Our extension, and a call that breaks what it did."""

    def strip(self):
        for module in self.get_model().modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()


if __name__ == "__main__":
    orders = options(plan=sys.argv[2]) | {"worker_extension_cls": "stripped.Stripping"}
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=64, dtype="float32", gpu_memory_utilization=0.1, **orders)
    llm.collective_rpc("strip")
    llm.generate(["12+30="], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print("went on")
