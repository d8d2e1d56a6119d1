"""Tasks: problems, prompts and scoring. Imports no torch; math-verify and datasets are imported when they are needed."""

from shaketable.evaluate.tasks.arithmetic import Arithmetic
from shaketable.evaluate.tasks.files import GSM8K, JsonlTask, TextTask, default_n, draw
from shaketable.evaluate.tasks.load import BUILT_IN, code_in, load_task
from shaketable.evaluate.tasks.task import Problem, Score, Split, Task, digest, examples, reward_of, sample, score_of

__all__ = [
    "BUILT_IN",
    "GSM8K",
    "Arithmetic",
    "JsonlTask",
    "Problem",
    "Score",
    "Split",
    "Task",
    "TextTask",
    "code_in",
    "default_n",
    "digest",
    "draw",
    "examples",
    "load_task",
    "reward_of",
    "sample",
    "score_of",
]
