"""A sidecar that runs: its doors, its parts, and what of its configuration changes on SIGHUP."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from parlay.controller.access import Door
from parlay.controller.config import Config, changed
from parlay.controller.log import StepLog
from parlay.controller.tls import ServerTls
from parlay.controller.tokens import Tokens

log = logging.getLogger("parlay.controller")


def doors(config: Config) -> tuple[Door, Door]:
    """Return the doors of the policy's and of admin's listener.

    Raises OSError or ValueError for files that are missing, malformed or readable by all.
    """
    tokens = None if config.tokens is None else Tokens(config.tokens)
    admin_tokens = None if config.admin_tokens is None else Tokens(config.admin_tokens)
    tls = admin_tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = ServerTls(config.tls_cert, config.tls_key, config.client_ca)
        admin_tls = ServerTls(config.tls_cert, config.tls_key, config.admin_client_ca)
    return (
        Door(tls, tokens, admin_tokens, frozenset(config.client_names), config.socket_mode),
        Door(admin_tls, admin_tokens, tokens, frozenset(config.admin_names)),
    )


@dataclasses.dataclass(slots=True)
class Running:
    """What a reload may reach; again: reads the configuration as at the start."""

    config: Config
    again: Callable[[], Config]
    door: Door
    admin_door: Door
    steps: StepLog | None = None
    page_tokens: Tokens | None = None

    def reload(self) -> None:
        """Read the configuration anew and apply what may change; never raises for what it says."""
        for tokens in (self.door.tokens, self.admin_door.tokens, self.page_tokens):
            if tokens is not None:
                tokens.refresh(at_once=True)
        try:
            new = self.again()
        except (OSError, ValueError) as error:
            log.error("config not reloaded, the one before stays reason=%r", str(error))
            return
        hot, cold = changed(self.config, new)
        for key in cold:
            log.error("config not changed key=%s reason='needs a restart'", key)
        self.config = dataclasses.replace(self.config, **hot)
        self.door.names = frozenset(self.config.client_names)
        self.admin_door.names = frozenset(self.config.admin_names)
        if self.steps is not None:
            self.steps.sample(self.config.log_sample)
        set_level(self.config.log_level)
        log.warning("config reloaded changed=%s", ",".join(sorted(hot)) or "nothing")


def set_level(level: str) -> None:
    """Let the project's own loggers say what is at least of this level."""
    logging.getLogger("parlay").setLevel(level.upper())
