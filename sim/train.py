"""Train a policy in the fast loop with stable-baselines3, and export it for `policies/learned.py`.

One process and one thread. Checkpoints hold tensors and plain values only and are loaded as such;
what they hold is the learner, not the loop: a run that goes on meets other requests.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from parlay.policies.features import ACTION_NAMES, FEATURES, SCHEMA
from parlay.policies.files import check_writable
from parlay.policies.network import save_network
from parlay.sim.clone import clone, recorded
from parlay.sim.env import Scaler, SlotVecEnv, fitted_scaler
from parlay.sim.export import actor_of, network_of, scores
from parlay.sim.fast import FastLoop
from parlay.sim.kinds import Kind, kinds_of
from parlay.sim.scenario import Scenario

ALGORITHMS = ("ppo", "maskable_ppo", "dqn", "recurrent_ppo")
CHECKPOINT_S = 120.0
_ROWS = 1536
"""Request slots to train on at once, over all scenarios."""
_LIFE_STEPS = 600
_SIZES = [64, 64]
_MEMORY = 64
"""Numbers that an LSTM keeps of each request, and again its outputs."""
_ENDLESS = 10**12
_SCALER_STEPS = 150
_CLONE_STEPS = 400
_PPO: Mapping[str, Any] = {
    "n_steps": 16,
    "n_epochs": 4,
    "gamma": 0.5,
    "gae_lambda": 0.9,
    "learning_rate": 1e-3,
    "ent_coef": 0.01,
    "max_grad_norm": 0.5,
}
"""A draft is over when its step is: gamma is small, for what else comes is other requests' luck."""
_DQN: Mapping[str, Any] = {
    "buffer_size": 400_000,
    "learning_starts": 20_000,
    "batch_size": 2048,
    "train_freq": 1,
    "gradient_steps": 1,
    "gamma": 0.5,
    "learning_rate": 1e-3,
    "target_update_interval": 50_000,
    "exploration_fraction": 1e-12,
    "exploration_initial_eps": 0.1,
    "exploration_final_eps": 0.1,
}
_LEAST_SHARE = 0.05
_LEAST_MINIBATCH = 2048


def _usual(algorithm: str) -> Mapping[str, Any]:
    return _DQN if algorithm == "dqn" else _PPO


@dataclass(slots=True, frozen=True)
class Training:
    """What to train: one of ALGORITHMS, on scenarios, for minutes of wall clock, into a file.

    vary: how far costs (log) and acceptance (log-odds) differ between batches, one standard
    deviation. clone: begin as the teacher of `clone.py`. settings: of the learner, by name, instead
    of the usual ones.
    """

    algorithm: str
    scenarios: tuple[Scenario, ...]
    minutes: float
    seed: int
    out: Path
    vary: float = 0.3
    clone: bool = False
    tpot_target_ms: float = float("nan")
    settings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"no algorithm '{self.algorithm}'; use {', '.join(ALGORITHMS)}")
        if not self.minutes > 0.0 or self.seed < 0 or not self.vary >= 0.0:
            raise ValueError("minutes must be above 0, seed and vary at least 0")
        if self.clone and self.algorithm not in ("ppo", "maskable_ppo"):
            raise ValueError(f"{self.algorithm} cannot begin as a clone: ppo and maskable_ppo can")
        usual = _usual(self.algorithm)
        for name, value in self.settings.items():
            if name not in usual:
                raise ValueError(
                    f"{self.algorithm} has no setting '{name}'; it has {', '.join(sorted(usual))}"
                )
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be a number from 0, not {value}")
        check_writable(self.out)

    @property
    def learner(self) -> dict[str, Any]:
        """Return the learner's settings, its own in place of the usual ones."""
        usual = _usual(self.algorithm)
        own = {name: type(usual[name])(value) for name, value in self.settings.items()}
        return {**usual, **own}

    @property
    def checkpoint(self) -> Path:
        """Return where checkpoints are written."""
        return self.out.with_name(self.out.name + ".ckpt")


Progress = Callable[[float, int, float], None]
"""Told of the share of the time that is over, row-steps so far, and goodput by no speculation's."""


def train(
    task: Training, resume: bool = False, progress: Progress = lambda *_: None, rows: int = _ROWS
) -> dict[str, Any]:
    """Train, write `task.out` and return its card; raises ValueError where a resume cannot be.

    rows: request slots at once.
    """
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    saved = _load_checkpoint(task) if resume else {}
    kinds = [kind for scenario in task.scenarios for kind in kinds_of(scenario, task.seed)]
    kinds = _copies(kinds, rows)
    starts = int(saved.get("starts", 0)) + 1
    scaler = Scaler(saved["centre"].numpy(), saved["scale"].numpy()) if saved else fitted_scaler(
        FastLoop(kinds, task.seed + 10**6, task.vary), _SCALER_STEPS, task.seed
    )  # fmt: skip
    env = SlotVecEnv(
        kinds,
        task.seed + 1000 * starts,
        task.vary,
        _LIFE_STEPS,
        task.tpot_target_ms,
        scaler,
        ends=task.algorithm == "recurrent_ppo",
    )
    model = make_model(task, env)
    spent_s = 0.0
    if saved:
        model.policy.load_state_dict(saved["policy"])
        model.policy.optimizer.load_state_dict(saved["optimizer"])
        model.num_timesteps, spent_s = int(saved["row_steps"]), float(saved["spent_s"])
    elif task.clone:
        seen, may, did = recorded(task.scenarios, _CLONE_STEPS, task.seed + 10**6)
        clone(actor_of(model), scaler(seen), may, did, task.seed)
    watch = _Watch(task, env, starts, spent_s, progress)
    if spent_s < 60.0 * task.minutes:
        model.learn(_ENDLESS, watch, reset_num_timesteps=False)
    _save_checkpoint(task, model, scaler, starts, watch.spent_s())
    return _export(task, model, scaler, watch.spent_s())


def _copies(kinds: Sequence[Kind], rows: int) -> list[Kind]:
    """Return each kind as often as gives each about the same number of rows."""
    share = rows / len(kinds)
    return [k for kind in kinds for k in [kind] * max(1, round(share / kind.concurrency))]


def make_model(task: Training, env: SlotVecEnv) -> BaseAlgorithm:
    """Return the learner; TensorBoard's files lie beside the result where it is installed."""
    has_board = importlib.util.find_spec("tensorboard") is not None
    common: dict[str, Any] = {
        "seed": task.seed,
        "device": "cpu",
        "tensorboard_log": str(task.out.with_suffix(".tb")) if has_board else None,
    }
    if task.algorithm == "dqn":
        return DQN("MlpPolicy", env, policy_kwargs={"net_arch": _SIZES}, **task.learner, **common)
    shape: dict[str, Any] = {"net_arch": {"pi": _SIZES, "vf": _SIZES}}
    rollout = task.learner["n_steps"] * env.num_envs
    parts = [
        n
        for n in (1, 2, 4, 8, 16)
        if rollout % n == 0 and (n == 1 or rollout // n >= _LEAST_MINIBATCH)
    ]
    common["batch_size"] = rollout // parts[-1]
    if task.algorithm == "recurrent_ppo":
        shape |= {"lstm_hidden_size": _MEMORY, "enable_critic_lstm": False}
        return RecurrentPPO("MlpLstmPolicy", env, policy_kwargs=shape, **task.learner, **common)
    kind = MaskablePPO if task.algorithm == "maskable_ppo" else PPO
    model: BaseAlgorithm = kind("MlpPolicy", env, policy_kwargs=shape, **task.learner, **common)
    return model


class _Watch(BaseCallback):
    """Keeps the time: shrinks steps and entropy towards its end, saves now and then, stops."""

    def __init__(
        self, task: Training, env: SlotVecEnv, starts: int, spent_s: float, progress: Progress
    ) -> None:
        super().__init__()
        self._task, self._env, self._starts, self._tell = task, env, starts, progress
        self._before_s, self._start_s = spent_s, time.monotonic()
        self._saved_s = self._told_s = self._start_s

    def spent_s(self) -> float:
        """Return the seconds trained, earlier runs included."""
        return self._before_s + time.monotonic() - self._start_s

    def _on_rollout_start(self) -> None:
        left = max(1.0 - self.spent_s() / (60.0 * self._task.minutes), _LEAST_SHARE)
        # The library's schedules count steps, of which nobody knows how many there will be.
        settings = self._task.learner
        self.model.lr_schedule = lambda _: left * settings["learning_rate"]
        if hasattr(self.model, "ent_coef"):
            self.model.ent_coef = left * settings["ent_coef"]

    def _on_step(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._told_s > 0.5:
            self._told_s = now_s
            loop = self._env.loop
            gain = float((self._env.reward.goodput * loop.plain_ms() / loop.sizes).mean())
            share = min(self.spent_s() / (60.0 * self._task.minutes), 1.0)
            self._tell(share, self.num_timesteps, gain)
        if now_s - self._saved_s > CHECKPOINT_S:
            self._saved_s = now_s
            env = self._env
            _save_checkpoint(self._task, self.model, env.scaler, self._starts, self.spent_s())
        return self.spent_s() < 60.0 * self._task.minutes


def _facts(task: Training) -> dict[str, Any]:
    """Return what a checkpoint must agree in with the run that goes on from it."""
    return {
        "schema": SCHEMA,
        "features": list(FEATURES),
        "actions": list(ACTION_NAMES),
        "algorithm": task.algorithm,
        "scenarios": [scenario.name for scenario in task.scenarios],
    }


def _save_checkpoint(
    task: Training, model: BaseAlgorithm, scaler: Scaler, starts: int, spent_s: float
) -> None:
    part = task.checkpoint.with_name(f"{task.checkpoint.name}.{os.getpid()}.part")
    content = {
        **_facts(task),
        "policy": model.policy.state_dict(),
        "optimizer": model.policy.optimizer.state_dict(),
        "centre": torch.as_tensor(scaler.centre),
        "scale": torch.as_tensor(scaler.scale),
        "row_steps": model.num_timesteps,
        "starts": starts,
        "spent_s": spent_s,
    }
    torch.save(content, part)
    os.replace(part, task.checkpoint)


def _load_checkpoint(task: Training) -> dict[str, Any]:
    path = task.checkpoint
    if not path.is_file():
        raise ValueError(f"nothing to resume: there is no {path}")
    try:
        saved = dict(torch.load(path, weights_only=True))
        unlike = [key for key, value in _facts(task).items() if saved[key] != value]
    except Exception as error:
        raise ValueError(f"the checkpoint {path} is damaged ({type(error).__name__})") from None
    if unlike:
        raise ValueError(f"the checkpoint {path} has another {unlike[0]}: train without --resume")
    return saved


def _export(task: Training, model: BaseAlgorithm, scaler: Scaler, spent_s: float) -> dict[str, Any]:
    """Write the network, score it in the engine's loop, and write it with its scores."""
    card: dict[str, Any] = {
        "algorithm": task.algorithm,
        "scenarios": [scenario.name for scenario in task.scenarios],
        "seed": task.seed,
        "vary": task.vary,
        "cloned": task.clone,
        "settings": dict(task.settings),
        "minutes": round(spent_s / 60.0, 2),
        "row_steps": model.num_timesteps,
    }
    save_network(task.out, network_of(model, scaler, card))
    card["tokens_per_s"] = {s.name: scores(s, task.out) for s in task.scenarios}
    save_network(task.out, network_of(model, scaler, card))
    return card
