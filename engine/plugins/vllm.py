"""vLLM: the plugin that vLLM finds, and the factory for its `--scheduler-cls`.

`PARLAY=1` in the environment, or `--scheduler-cls parlay.engine.plugins.vllm.make_scheduler`.
Free of vLLM until one of the two is called.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

FACTORY = "parlay.engine.plugins.vllm.make_scheduler"
"""What `--scheduler-cls` takes."""
_MARK = "_parlay_wraps"


def register() -> None:
    """Steer every engine that this process starts; vLLM calls this at start, in each process.

    The entry point `parlay` of the group `vllm.general_plugins`. Does nothing unless PARLAY=1.
    """
    if os.environ.get("PARLAY") != "1":
        return
    config = importlib.import_module("vllm.config.scheduler").SchedulerConfig
    ordinary = config.get_scheduler_cls
    if hasattr(ordinary, _MARK):
        return

    def get_scheduler_cls(self: Any) -> Any:
        chosen = ordinary(self)
        if not isinstance(chosen, type) or hasattr(chosen, "parlay"):
            return chosen
        return _steered(chosen)

    setattr(get_scheduler_cls, _MARK, ordinary)
    config.get_scheduler_cls = get_scheduler_cls


def unregister() -> None:
    """Leave engines that start from now on alone."""
    config = importlib.import_module("vllm.config.scheduler").SchedulerConfig
    config.get_scheduler_cls = getattr(config.get_scheduler_cls, _MARK, config.get_scheduler_cls)


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """Return a steered scheduler of the kind, synchronous or not, that vLLM would have made."""
    if vllm_config.scheduler_config.async_scheduling:
        base = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    else:
        base = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    return _steered(base)(vllm_config=vllm_config, **kwargs)


def _steered(base: type) -> type:
    # Every process of vLLM's calls `register`; only the one that schedules needs the rest.
    from parlay.engine.plugins.vllm_scheduler import steered

    return steered(base)
