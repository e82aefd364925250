"""One test game, step by step: what the agent sees, how its counter reads it, what it trusts."""

import base64
import math
import zlib
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from cbsql.counts import DensityCounter
from cbsql.deep import SQL
from cbsql.deep.policies import RainbowNetwork
from cbsql.envs.atari import PROTOCOLS, rom_name
from cbsql.experiments.report.page import render, title
from cbsql.experiments.runner import frames_per_second, make_env, policy_of_test
from cbsql.experiments.spec import RunSpec
from cbsql.operators import mellowmax, soft_policy
from cbsql.temperature import CountBased

LARGEST_PICTURE = 160  # pixels of the longer side; larger pictures are averaged
LONGEST_OBSERVATION = 32  # numbers that are shown as such
NATS_PER_UNIT = 1 / 16  # of surprise, in the bytes that the page has


@dataclass
class Game:
    """A recorded game; the lists have one entry for each step, from before its action."""

    spec: RunSpec
    seed: int
    actions: list[str]
    frames_per_second: float
    temperature: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[NDArray[np.uint8]] = field(default_factory=list)
    """What the environment draws, (H, W, channels); none if it cannot."""
    symbols: list[NDArray[np.uint8]] = field(default_factory=list)
    """What a density model sees, (H, W)."""
    surprises: list[NDArray[np.uint8]] = field(default_factory=list)
    """-log p of each of its pixels, in units of 1/16 nat."""
    levels: int = 0
    """Grey levels of the symbols."""
    score: float | None = None
    """Of the whole game, if it came to its end."""
    chosen_from: int = 1
    """How many games it is the best of."""


def play_best(spec: RunSpec, model: SQL, seed: int, steps: int, games: int) -> Game:
    """Play so many games, each with its own seed, and return the one with the highest score."""
    played = [play(spec, model, seed + i, steps) for i in range(games)]
    best = max(played, key=lambda game: -math.inf if game.score is None else game.score)
    best.chosen_from = games
    return best


def play(spec: RunSpec, model: SQL, seed: int, steps: int) -> Game:
    """Play a game under the preset's test policy, for at most so many steps."""
    with closing(make_env(spec, seed)) as env:
        fps = frames_per_second(spec, env)
        game = Game(spec, seed, action_names(spec, env), fps, repr(model.temperature))
        policy = policy_of_test(spec, model, env, seed)
        observation = env.reset()
        while game.score is None and len(game.steps) < steps:
            step = _look(game, model, observation)
            _draw(game, env)
            action, explored = policy(observation)
            observation, rewards, _, infos = env.step(action)
            step.update(action=int(action[0]), explored=explored, reward=float(rewards[0]))
            game.steps.append(step)
            if "episode" in infos[0]:
                game.score = float(infos[0]["episode"]["r"])
    return game


@torch.no_grad()
def _look(game: Game, model: SQL, observation: Any) -> dict[str, Any]:
    """What the model makes of one state."""
    state, _ = model.policy.obs_to_tensor(observation)
    network = model.q_net
    # Test games are played without noise.
    quiet = network.temporary_noise(0) if isinstance(network, RainbowNetwork) else nullcontext()
    with quiet:
        q = network(state).double()  # (1, actions)
    beta = model.temperature.beta(state)
    trust = torch.as_tensor(beta, dtype=q.dtype, device=q.device).reshape(-1).expand(1)
    step = {
        "q": q[0].tolist(),
        "policy": soft_policy(q, trust)[0].tolist(),
        "value": float(mellowmax(q, trust)),
        "beta": float(trust),
    }
    if isinstance(model.temperature, CountBased):
        counter = model.temperature.counter
        assert counter is not None
        step["count"] = float(counter.count(state)[0])
        if isinstance(counter, DensityCounter):
            assert isinstance(state, torch.Tensor)
            symbols = counter.symbols(state)
            nats = -counter.density.pixel_log_prob(symbols)[0]
            game.levels = counter.density.levels
            game.symbols.append(symbols[0])
            units = np.minimum(np.rint(nats / NATS_PER_UNIT), 255)
            game.surprises.append(units.astype(np.uint8))
            step["surprise"] = float(nats.sum())
    if isinstance(state, torch.Tensor) and state.numel() <= LONGEST_OBSERVATION:
        step["observation"] = state.flatten().tolist()
    return step


def _draw(game: Game, env: VecEnv) -> None:
    """Add a picture of the moment, small and in as many channels as it needs."""
    if env.render_mode is None or (game.steps and not game.pictures):
        return  # it could not at the first step either
    try:
        picture = env.render()
    except gym.error.DependencyNotInstalled:
        return
    if picture is None:
        return
    if not np.issubdtype(picture.dtype, np.integer):
        picture = np.rint(picture * 255)
    picture = np.asarray(picture, np.uint8).reshape(*picture.shape[:2], -1)
    every = -(-max(picture.shape[:2]) // LARGEST_PICTURE)
    height, width = (size // every * every for size in picture.shape[:2])
    parts = picture[:height, :width].reshape(height // every, every, width // every, every, -1)
    game.pictures.append(np.rint(parts.mean((1, 3))).astype(np.uint8))


def action_names(spec: RunSpec, env: VecEnv) -> list[str]:
    """What the actions are called, where the environment says so, else their numbers."""
    assert isinstance(env.action_space, gym.spaces.Discrete)
    if spec.is_atari:
        rom, protocol = rom_name(spec.game), PROTOCOLS[spec.protocol]
        games = (entry for entry in gym.registry.values() if entry.namespace == "ALE")
        name = next(entry.id for entry in games if entry.kwargs["game"] == rom)
        with closing(gym.make(name, full_action_space=protocol.all_actions)) as game:
            names: list[str] = game.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
            return [action.lower() for action in names]
    if spec.game.startswith("MinAtar/"):
        words = ("no-op", "left", "up", "right", "down", "fire")
        return [words[action] for action in env.get_attr("action_set")[0]]
    return [str(action) for action in range(int(env.action_space.n))]


def make_view(game: Game) -> str:
    """The page of a game."""
    data = {
        "steps": {name: [_short(step[name]) for step in game.steps] for name in game.steps[0]},
        "actions": game.actions,
        "framesPerSecond": game.frames_per_second,
        "levels": game.levels,
        "natsPerUnit": NATS_PER_UNIT,
        "films": {
            name: _pack(np.stack(frames))
            for name in ("pictures", "symbols", "surprises")
            if (frames := getattr(game, name))
        },
    }
    constant = game.spec.algorithm.removeprefix("rainbow-") == "sql"
    algorithm = f"{game.spec.algorithm} {game.spec.beta:g}" if constant else game.spec.algorithm
    return render("view.html", game=game, data=data, algorithm=title(algorithm))


def _short(value: Any) -> Any:
    """Five digits; what is infinite becomes null."""
    if isinstance(value, list):
        return [_short(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def _pack(film: NDArray[np.uint8]) -> dict[str, Any]:
    """Frames (steps, ...) as differences from the frame before, which are mostly zero."""
    if film.ndim == 4 and (film == film[..., :1]).all():
        film = film[..., :1]
    changes = np.diff(film, axis=0, prepend=np.zeros_like(film[:1]))  # modulo 256
    packed = base64.b64encode(zlib.compress(changes.tobytes(), 9)).decode()
    return {"shape": film.shape, "data": packed}
