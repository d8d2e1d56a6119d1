"""Tasks: problems, prompts and scoring. Imports no torch; math-verify and datasets are imported when they are needed."""

from shaketable.measure.tasks.arithmetic import Arithmetic
from shaketable.measure.tasks.gsm8k import GSM8K
from shaketable.measure.tasks.jsonl import JsonlTask
from shaketable.measure.tasks.load import load_task
from shaketable.measure.tasks.task import Problem, Score, Split, Task, sample
from shaketable.measure.tasks.text import TextTask

__all__ = ["GSM8K", "Arithmetic", "JsonlTask", "Problem", "Score", "Split", "Task", "TextTask", "load_task", "sample"]
