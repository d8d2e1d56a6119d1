"""A user's program that samples with vLLM: offline.py MODEL [ANSWERS.json]. Not a word about shaketable."""

import json
import sys

from vllm import LLM, SamplingParams

PROMPTS = ["12+30=", "7+8=", "99+1=", "123+456="]

if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=64, dtype="float32", gpu_memory_utilization=0.1)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, logprobs=0), use_tqdm=False)
    answers = [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w") as file:
            json.dump(answers, file)
    print("answers", [o.outputs[0].text for o in outputs])
