"""Tasks: problems, prompts and scoring. Imports no torch; math-verify and datasets are imported when they are needed."""

from shaketable.evaluate.tasks.arithmetic import Arithmetic
from shaketable.evaluate.tasks.gsm8k import GSM8K
from shaketable.evaluate.tasks.jsonl import JsonlTask
from shaketable.evaluate.tasks.load import load_task
from shaketable.evaluate.tasks.task import Problem, Score, Split, Task, sample
from shaketable.evaluate.tasks.text import TextTask

__all__ = ["GSM8K", "Arithmetic", "JsonlTask", "Problem", "Score", "Split", "Task", "TextTask", "load_task", "sample"]
