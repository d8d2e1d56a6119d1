"""A program that gives vLLM its instructions by `options`: with_options.py MODEL PLAN LEDGER."""

import sys

from vllm import LLM, SamplingParams

from shaketable.integrations.vllm import connect, options

if __name__ == "__main__":
    instructions = options(plan=sys.argv[2], ledger=sys.argv[3])
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=64, dtype="float32", gpu_memory_utilization=0.1, **instructions)
    llm.generate(["12+30="], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print("fires", connect(llm).ledger()[0]["plan"]["forward"])
    connect(llm).set_magnitude(0.0)
