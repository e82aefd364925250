"""Atari games as a Stable-Baselines3 vector environment, after two published protocols."""

import difflib
import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import ale_py
import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

gym.register_envs(ale_py)

FRAME_SKIP = 4  # emulator frames per agent step
FRAME_STACK = 4
MAX_GAME_FRAMES = 108_000  # half an hour of play
# Agent steps after which the next game gets a new seed: it takes as long as hundreds of steps, and
# whoever comes back to a moment plays again all that happened since.
RESEED_STEPS = 10_000


@dataclass(frozen=True)
class Protocol:
    """What distinguishes the ways in which Atari results are reported."""

    life_loss_ends_episode: bool
    """The learner's episode ends with a life; the game goes on where it was."""
    sticky_actions: float
    """Probability that the emulator repeats the previous action, at each frame."""
    all_actions: bool
    """All 18 actions of the joystick instead of those that have an effect in the game."""
    noop_frames: int
    """A game starts with a random number of idle frames, up to this many."""


PROTOCOLS = {
    # Mnih et al., 2015, "Human-level control through deep reinforcement learning"
    "nature": Protocol(True, 0.0, False, 30),
    # Machado et al., 2018, "Revisiting the Arcade Learning Environment": chance comes from sticky
    # actions instead of idle starts, and nothing tells the agent about lives or useful actions.
    "machado": Protocol(False, 0.25, True, 0),
}


def make_atari_vec_env(
    game: str,
    protocol: Literal["nature", "machado"] = "nature",
    n_envs: int = 1,
    seed: int | None = None,
) -> "AtariVecEnv":
    """Make a vector of Atari games, ready for Stable-Baselines3's `CnnPolicy`.

    :param game: in any usual spelling: "space_invaders", "SpaceInvaders", "ALE/SpaceInvaders-v5"
    :param protocol: "nature" (Mnih et al., 2015) or "machado" (Machado et al., 2018)
    :param n_envs: games played at the same time, each with the seed after that of the one before
    :param seed: of the idle starts and the sticky actions; None draws one. The `seed=` of an SB3
        algorithm replaces it.
    """
    if protocol not in PROTOCOLS:
        known = " or ".join(repr(name) for name in PROTOCOLS)
        raise ValueError(f"protocol must be {known}, got {protocol!r}.")
    if n_envs < 1:
        raise ValueError(f"n_envs must be at least 1, got {n_envs}.")
    env = AtariVecEnv(rom_name(game), PROTOCOLS[protocol], n_envs)
    if seed is not None:
        env.seed(seed)
    return env


def rom_name(game: str) -> str:
    """Return the emulator's name of a game, such as "space_invaders" for "ALE/SpaceInvaders-v5"."""
    roms = {
        _letters(spec.kwargs["game"]): spec.kwargs["game"]
        for spec in gym.registry.values()
        if spec.namespace == "ALE"
    }
    bare = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", game)
    if _letters(bare) in roms:
        return str(roms[_letters(bare)])
    nearest = difflib.get_close_matches(_letters(bare), roms, n=5)
    names = ", ".join(roms[letters] for letters in nearest) or "none is near"
    message = f"No Atari game is called {game!r}. Nearest names: {names}."
    if game not in gym.registry:
        ids = ", ".join(difflib.get_close_matches(game, gym.registry, n=3)) or "none is near"
        message += f" Nor is it the id of a Gymnasium environment. Nearest ids: {ids}."
    raise ValueError(message)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class AtariVecEnv(VecEnv):
    """Several copies of one Atari game, stepped by ale-py's own threads.

    Observations are (4, 84, 84) uint8: grey, the newest frame last, channels first, so that SB3
    needs no transposition. One step is four frames with the same action and shows the pixel-wise
    maximum of the last two. Before the first frame of a game the stack holds zeros; it is not
    cleared when a life is lost.

    Rewards are clipped to [-1, 1]. `info` holds the scores, which are not:

    - `info["life"]`: `score` and `steps` of a life, when it is lost and when the game ends;
    - `info["game"]`: `score`, `steps` and `frames` (four per step) of a game, when it ends;
    - `info["episode"]`: the score and steps of the game once more as `r` and `l`, in the form of
      SB3's `Monitor`, so that `ep_rew_mean` and `evaluate_policy` speak of whole games.

    At 108,000 frames a game is cut off: `info["TimeLimit.truncated"]`. As always in SB3, the last
    observation of an episode is `info["terminal_observation"]`.

    `step_async` returns at once and the games are played in the background until `step_wait`.

    Seed and actions are all that a game depends on, so it can be played again: see `episodes`.
    """

    render_mode = "rgb_array"
    frame_stack = FRAME_STACK
    """Frames on the first axis of an observation, for who wants to store each of them once."""

    def __init__(self, rom: str, protocol: Protocol, n_envs: int) -> None:
        self.game = rom
        self.protocol = protocol
        self._games = AtariVectorEnv(
            rom,
            n_envs,
            autoreset_mode=AutoresetMode.SAME_STEP,
            frameskip=FRAME_SKIP,
            stack_num=FRAME_STACK,
            max_num_frames_per_episode=MAX_GAME_FRAMES,
            repeat_action_probability=protocol.sticky_actions,
            full_action_space=protocol.all_actions,
            noop_max=protocol.noop_frames + 1,  # it draws a number below this one
            use_fire_reset=False,
            # Lives are handled here: `episodic_life` would start a new game after each of them, and
            # with `life_loss_info` the `final_obs` of a lost life is uninitialised memory.
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
        )
        super().__init__(
            n_envs, self._games.single_observation_space, self._games.single_action_space
        )
        self._n_actions = len(self._games.ale.get_action_set())
        self._waiting = False
        self._start_time = time.perf_counter()
        # The latest seed of each environment, where the next comes from, and what was done since.
        self._latest_seeds = np.zeros(n_envs, np.int64)
        self._rngs = [np.random.default_rng() for _ in range(n_envs)]
        self._actions: list[list[int]] = []

    def reset(self) -> NDArray[np.uint8]:
        """Start new games; with the seeds of `seed()` if it was called since the last reset."""
        if self._waiting:
            self.step_wait()
        for i, seed in enumerate(self._seeds):
            if seed is not None:
                self._rngs[i] = np.random.default_rng(seed)
                self._latest_seeds[i] = seed % 2**31  # the emulator takes 31 bits; SB3 draws 32
            else:
                self._latest_seeds[i] = self._rngs[i].integers(2**31)
        self._actions = [[] for _ in range(self.num_envs)]
        self._obs, info = self._games.reset(seed=self._latest_seeds)
        self._reset_seeds()
        self._reset_options()
        self._lives = info["lives"]
        # score and steps of the current life and game of each environment
        self._life_score, self._game_score = np.zeros((2, self.num_envs))
        self._life_steps, self._game_steps = np.zeros((2, self.num_envs), np.int64)
        return self._obs  # type: ignore[no-any-return]

    def step_async(self, actions: NDArray[Any]) -> None:
        """Let the games play one step in the background."""
        actions = np.asarray(actions, np.int64)
        if actions.shape != (self.num_envs,):
            raise ValueError(f"There are {self.num_envs} games, each takes an action: {actions}.")
        # An invalid action would stop one of ale-py's threads, and `step_wait` would never return.
        if actions.min() < 0 or actions.max() >= self._n_actions:
            raise ValueError(f"Actions must be in {self.action_space}, got {actions}.")
        for done_before, action in zip(self._actions, actions.tolist(), strict=True):
            done_before.append(action)
        self._games.send(actions)
        self._waiting = True

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step to end; games that are over have started again."""
        obs, raw_rewards, terminated, truncated, native = self._games.recv()
        self._waiting = False
        game_over = terminated | truncated
        due = game_over & [len(actions) >= RESEED_STEPS for actions in self._actions]
        if due.any():
            obs, native = self._reseed(due, native)
        self._obs = obs
        # Some games stay at zero lives for a while before they are over; that is no lost life.
        life_lost = (native["lives"] > 0) & (native["lives"] < self._lives)
        self._lives = native["lives"]
        for total in (self._life_score, self._game_score):
            total += raw_rewards
        for count in (self._life_steps, self._game_steps):
            count += 1

        dones = game_over | life_lost if self.protocol.life_loss_ends_episode else game_over
        infos: list[dict[str, Any]] = [
            {"lives": int(lives), "TimeLimit.truncated": False} for lives in self._lives
        ]
        for i in np.flatnonzero(game_over | life_lost):
            info = infos[i]
            info["life"] = {
                "score": float(self._life_score[i]),
                "steps": int(self._life_steps[i]),
            }
            self._life_score[i] = self._life_steps[i] = 0
            if game_over[i]:
                score, steps = float(self._game_score[i]), int(self._game_steps[i])
                seconds = round(time.perf_counter() - self._start_time, 6)
                info["game"] = {"score": score, "steps": steps, "frames": steps * FRAME_SKIP}
                info["episode"] = {"r": score, "l": steps, "t": seconds}
                info["TimeLimit.truncated"] = bool(truncated[i])
                self._game_score[i] = self._game_steps[i] = 0
            if dones[i]:
                info["terminal_observation"] = native["final_obs"][i] if game_over[i] else obs[i]
        return obs, np.clip(raw_rewards, -1, 1).astype(np.float32), dones, infos

    def _reseed(
        self, due: NDArray[np.bool_], native: dict[str, Any]
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start the games that ale-py has just started once more, with new seeds."""
        for i in np.flatnonzero(due):
            self._latest_seeds[i] = self._rngs[i].integers(2**31)
            self._actions[i] = []
        final_obs = native["final_obs"].copy()  # ale-py's own memory
        obs, first = self._games.reset(seed=self._latest_seeds[due], options={"reset_mask": due})
        return obs, {**native, "final_obs": final_obs, "lives": first["lives"]}

    def episodes(self) -> list[dict[str, Any]]:
        """What it takes to come back to this moment of each environment, ready for JSON."""
        return [
            {
                "generator": self._rngs[i].bit_generator.state,
                "seed": int(self._latest_seeds[i]),
                "actions": self._actions[i],
            }
            for i in range(self.num_envs)
        ]

    def replay_episodes(self, moments: list[dict[str, Any]]) -> NDArray[np.uint8]:
        """Play games again up to where they were, all at once; returns the observations there."""
        self.reset()
        lengths = np.array([len(moment["actions"]) for moment in moments])
        longest = int(lengths.max())
        # Who has less to play starts later; until then its environment idles.
        padded = [[0] * (longest - len(m["actions"])) + m["actions"] for m in moments]
        for steps_left in range(longest, -1, -1):
            starting = lengths == steps_left
            if starting.any():
                for i in np.flatnonzero(starting):
                    self._latest_seeds[i] = moments[i]["seed"]
                    self._actions[i] = []
                    self._life_score[i] = self._game_score[i] = 0
                    self._life_steps[i] = self._game_steps[i] = 0
                self._obs, info = self._games.reset(
                    seed=self._latest_seeds[starting], options={"reset_mask": starting}
                )
                self._lives = np.where(starting, info["lives"], self._lives)
            if steps_left:
                self.step(np.array([actions[-steps_left] for actions in padded]))
        for rng, moment in zip(self._rngs, moments, strict=True):
            rng.bit_generator.state = moment["generator"]
        return self._obs  # type: ignore[no-any-return]

    def get_images(self) -> list[NDArray[np.uint8]]:
        """Return the newest frame of each game, as the agent sees it but with three channels."""
        return [np.repeat(obs[-1][:, :, None], 3, axis=2) for obs in self._obs]

    def close(self) -> None:
        """End the games."""
        self._games.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of this object for each of the games, which have none."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: the games are not Python objects."""
        raise AttributeError(f"Cannot set {attr_name!r}: {_NO_OBJECTS}")

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Refuse: the games are not Python objects."""
        raise AttributeError(f"Cannot call {method_name!r}: {_NO_OBJECTS}")

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None
    ) -> list[bool]:
        """Tell that `info["episode"]` is there, as if SB3's `Monitor` had put it there."""
        monitored = issubclass(wrapper_class, Monitor)
        return [monitored] * len(list(self._get_indices(indices)))


_NO_OBJECTS = "the games of an AtariVecEnv run inside ale-py and are not Python objects."
