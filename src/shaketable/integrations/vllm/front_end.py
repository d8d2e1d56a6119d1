"""What is done with instructions in the process that the user has started, before and while vLLM starts others.

vLLM makes its whole config there. What the config alone shows to be impossible is refused at once: instructions that cannot be
read, two that differ, a plan that nothing can come of, layers that the model does not have, activations where CUDA graphs are
captured. Where instructions came by the environment the program knows nothing of us and ends with one line; otherwise the
caller gets the error.

What only the model shows is refused by the worker that has it (`refusals.py`). vLLM then raises one error without the reason
in its engine, and another one in its client: the first is left out, and the reason is put in the place of the second.

An engine with instructions and without a folder for its ledger would leave no trace of what it did: it is given one, unless
`shaketable run` keeps its ledger, or the program has called `options` and can ask with `connect`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shaketable.aqn.spec import AQN
from shaketable.errors import PlanError, ShaketableError
from shaketable.integrations.common.instructions import VARIABLES
from shaketable.integrations.vllm import EXTENSION
from shaketable.integrations.vllm.entry_points import read_instructions
from shaketable.integrations.vllm.refusals import WHY, refuse_captured, refuse_idle, refuse_layers, refuse_standstill, tell
from shaketable.launch.process import active
from shaketable.launch.run import default_folder
from shaketable.plan import Plan


def check(config: Any) -> None:
    """Refuse what cannot be done in a vLLM with this config, and see to it that a ledger is kept."""
    if config.model_config is None:
        return
    try:
        _check(config)
    except ShaketableError as error:
        if _own(config):
            raise
        tell(error)
        raise SystemExit(2) from None


def _check(config: Any) -> None:
    instructions = read_instructions(config)
    if instructions is None:
        return
    if instructions.plan is not None:
        plan = Plan.parse(instructions.plan)
        if not os.environ.get(VARIABLES["plan"]):
            refuse_idle(plan)
        refuse_layers(plan, config.model_config.hf_text_config)
        refuse_captured(plan, config)
    if (
        instructions.aqn is not None
        and config.parallel_config.worker_extension_cls in (None, "")
        and instructions.total_steps == 1
    ):
        refuse_standstill(AQN.load(instructions.aqn))
    if instructions.ledger is None and active() is None and config.parallel_config.worker_extension_cls != EXTENSION:
        _keep_ledger(config, str(default_folder().resolve()))


def _own(config: Any) -> Any:
    """The instructions that the config itself has."""
    return config.additional_config.get("shaketable") if isinstance(config.additional_config, dict) else None


def _keep_ledger(config: Any, folder: str) -> None:
    """Have every worker leave its ledger in a folder."""
    if own := _own(config):
        own["ledger"] = folder
    else:
        os.environ[VARIABLES["ledger"]] = folder


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """`VllmConfig.__init__`, after which what cannot be done has been refused.

    Not `__post_init__`: there pydantic would put a plan's error into one of its own.
    """

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        check(self)

    return begin


def with_the_reason(init: Callable[..., None]) -> Callable[..., None]:
    """`MPClient.__init__`, which raises the reason why an engine did not start, if it is ours."""

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        with TemporaryDirectory(prefix="shaketable-") as folder:
            file = Path(folder, "why")
            os.environ[WHY] = str(file)
            try:
                init(self, *args, **kwargs)
            except RuntimeError:
                if not file.exists():
                    raise
                if not _own(self.vllm_config):
                    raise SystemExit(2) from None
                raise PlanError(file.read_text(encoding="utf-8")) from None
            finally:
                os.environ.pop(WHY, None)

    return begin


def without_traceback(init: Callable[..., None]) -> Callable[..., None]:
    """`Executor.__init__`, which ends the process of its engine quietly when a worker has told why it does not start.

    Not `EngineCore.__init__`: vLLM loads plugins inside of it.
    """

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except Exception:  # vLLM raises it bare
            if not os.path.exists(os.environ.get(WHY, "")) or multiprocessing.parent_process() is None:
                raise
            raise SystemExit(2) from None

    return begin
