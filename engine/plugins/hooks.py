"""An engine's own class, extended at a few of its methods: what plugins that do so share.

Where something of ours goes wrong it says so once and stands aside for good: the engine goes on as
it does without us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lacking(of: Any, methods: Iterable[str]) -> str | None:
    """Return the first of the methods that a class or an object lacks, None for none."""
    return next((m for m in methods if not callable(getattr(of, m, None))), None)


def extended(
    base: Any,
    begin: Callable[[Any], Any],
    hooks: Mapping[str, Callable[[Any], Callable[..., Any]]],
    **attributes: Any,
) -> type:
    """Return a subclass of `base` whose objects have what steers them as `parlay`, or None.

    begin: makes that, once the engine's own __init__ is through. hooks: by method, what makes ours
    of `base`. attributes: more of the class's.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        self.parlay = begin(self)

    bound = {name: hook(base) for name, hook in hooks.items()}
    own = {"__init__": __init__, "parlay": None, **attributes, **bound}
    return type(f"Parlay{base.__name__}", (base,), own)


def ours(
    log: logging.Logger,
    stops: str,
    host: Any,
    do: Callable[[Any], Any],
    otherwise: Callable[[], Any] = lambda: None,
) -> Any:
    """Do our part of a hook of `host`, an object of an extended class; else the engine's own.

    What fails ends the steering and not the step; stops: the line that says so.
    """
    steering = host.parlay
    if steering is None:
        return otherwise()
    try:
        return do(steering)
    except Exception:
        log.exception(stops)
        host.parlay = None
        steering.close()
        return otherwise()


def reason(error: Exception) -> str:
    """Return an error for a line of the log: a ValueError of ours is a line already."""
    return str(error) if isinstance(error, ValueError) else repr(error)
