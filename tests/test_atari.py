"""The Atari environment against Gymnasium's wrappers and against a bare emulator."""

import dataclasses
import json

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch as th
from ale_py import roms
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecCheckNan

from cbsql.envs import atari, make_atari_vec_env
from cbsql.envs.atari import PROTOCOLS, AtariVecEnv
from cbsql.replay import FrameReplayBuffer, stacked_frames

NO_IDLE_START = dataclasses.replace(PROTOCOLS["nature"], noop_frames=0)


@pytest.mark.parametrize(
    ("game", "steps"),
    [("breakout", 400), ("ms_pacman", 700), ("pong", 1100), ("qbert", 400), ("seaquest", 600)],
)
def test_observations_are_those_of_gymnasiums_wrappers(game, steps):
    """Every pixel of every stack, through lost lives, ends and new games."""
    env = AtariVecEnv(game, NO_IDLE_START, 1)
    name = "".join(part.title() for part in game.split("_"))
    reference = gym.make(f"ALE/{name}-v5", frameskip=1, repeat_action_probability=0.0)
    reference = AtariPreprocessing(reference, noop_max=0)
    reference = FrameStackObservation(reference, 4, padding_type="zero")
    np.testing.assert_array_equal(env.reset()[0], reference.reset(seed=0)[0])
    rng = np.random.default_rng(0)
    lives_lost = games = 0
    for _ in range(steps):
        action = rng.integers(env.action_space.n)
        obs, rewards, dones, (info,) = env.step([action])
        wanted, reward, terminated, truncated, _ = reference.step(action)
        assert rewards[0] == np.clip(reward, -1, 1)
        assert not truncated
        if terminated:
            games += 1
            assert dones[0]
            np.testing.assert_array_equal(info["terminal_observation"], wanted)
            wanted, _ = reference.reset()
        elif dones[0]:
            lives_lost += 1
            np.testing.assert_array_equal(info["terminal_observation"], wanted)
        np.testing.assert_array_equal(obs[0], wanted)
    assert games >= 1
    assert lives_lost >= 2 or game == "pong"


def bare_emulator(game, actions, seed, sticky, all_actions):
    """Play in the emulator itself; yield (reward, lives, game over) of each agent step."""
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", sticky)
    ale.loadROM(roms.get_rom_path(game))
    ale.reset_game()  # as the first reset of the environment does; each draws from the same stream
    buttons = ale.getLegalActionSet() if all_actions else ale.getMinimalActionSet()
    for action in actions:
        reward = 0
        for _ in range(4):
            reward += ale.act(buttons[action])
            if ale.game_over():
                break
        yield reward, ale.lives(), ale.game_over()
        if ale.game_over():
            ale.reset_game()


@pytest.mark.parametrize(
    ("game", "name"),
    [
        ("breakout", "nature"),
        ("qbert", "nature"),
        ("seaquest", "nature"),
        ("pong", "machado"),
        ("seaquest", "machado"),
    ],
)
def test_scores_and_ends_are_those_of_the_emulator(game, name):
    protocol = dataclasses.replace(PROTOCOLS[name], noop_frames=0)
    env = AtariVecEnv(game, protocol, 2)
    env.seed(41)
    env.reset()
    actions = np.random.default_rng(1).integers(env.action_space.n, size=(1200, 2))
    emulators = [
        bare_emulator(game, actions[:, i], 41 + i, protocol.sticky_actions, name == "machado")
        for i in range(2)
    ]
    life = [{"score": 0.0, "steps": 0} for _ in range(2)]
    games = [{"score": 0.0, "steps": 0} for _ in range(2)]
    lives_before = [None, None]
    ends = 0
    for step, outcomes in enumerate(zip(*emulators, strict=True)):
        _, rewards, dones, infos = env.step(actions[step])
        for i, (reward, lives, over) in enumerate(outcomes):
            assert rewards[i] == max(-1, min(1, reward))
            for record in (life[i], games[i]):
                record["score"] += reward
                record["steps"] += 1
            lost = lives_before[i] is not None and 0 < lives < lives_before[i]
            assert dones[i] == (over or (lost and name == "nature"))
            assert infos[i].get("life") == (life[i] if over or lost else None)
            game_record = {**games[i], "frames": 4 * games[i]["steps"]} if over else None
            assert infos[i].get("game") == game_record
            assert ("terminal_observation" in infos[i]) == dones[i]
            if over:
                assert infos[i]["episode"]["r"] == games[i]["score"]
                games[i] = {"score": 0.0, "steps": 0}
                ends += 1
            if over or lost:
                life[i] = {"score": 0.0, "steps": 0}
            lives_before[i] = None if over else lives
    assert ends >= 2


def test_no_lives_left_is_not_yet_the_end(monkeypatch):
    """Some games show zero lives for a while before they are over; the last life ends only then."""
    env = make_atari_vec_env("qbert")
    obs = env.reset()
    lives = iter([4, 3, 5, 1, 0, 0, 4])  # a life lost, two won, four lost, waiting, a new game
    over = iter([False, False, False, False, False, False, True])

    def recv():
        flags = np.array([next(over)]), np.array([False])
        return obs, np.array([10]), *flags, {"lives": np.array([next(lives)]), "final_obs": obs}

    monkeypatch.setattr(env._games, "recv", recv)
    steps = [env.step_wait() for _ in range(7)]
    assert [bool(dones[0]) for _, _, dones, _ in steps] == [0, 1, 0, 1, 0, 0, 1]
    scores = [infos[0]["life"]["score"] for *_, infos in steps if "life" in infos[0]]
    assert scores == [20, 20, 30]
    assert steps[-1][3][0]["game"]["score"] == 70


def test_protocols_have_the_published_actions_and_starts():
    assert make_atari_vec_env("breakout", "nature").action_space.n == 4
    assert make_atari_vec_env("breakout", "machado").action_space.n == 18

    def idle_frames(protocol, resets):
        env = make_atari_vec_env("freeway", protocol, n_envs=4)
        starts = [env._games.reset(seed=0 if i == 0 else None)[1] for i in range(resets)]
        return {int(frames) for info in starts for frames in info["episode_frame_number"]}

    (no_idle_frames,) = idle_frames("machado", 3)
    starts = idle_frames("nature", 25)
    assert (min(starts), max(starts)) == (no_idle_frames, no_idle_frames + 30)
    assert len(starts) > 20


def test_a_game_is_cut_off_at_the_frame_limit(monkeypatch):
    monkeypatch.setattr(atari, "MAX_GAME_FRAMES", 200)
    env = make_atari_vec_env("freeway", "machado", seed=0)
    env.reset()
    for step in range(1, 101):
        obs, _, dones, (info,) = env.step([0])
        assert dones[0] == info["TimeLimit.truncated"] == (step % 50 == 0)
        if dones[0]:
            assert info["game"] == {"score": 0.0, "steps": 50, "frames": 200}
            assert info["terminal_observation"][0].any()  # a full stack of the old game
            assert not obs[0, :3].any()  # the first stack of the new one
            assert obs[0, 3].any()


def rollout(env, steps=120):
    rng = np.random.default_rng(0)
    seen = [env.reset()]
    for _ in range(steps):
        obs, rewards, dones, _ = env.step(rng.integers(env.action_space.n, size=env.num_envs))
        seen += [obs, rewards, dones]
    return seen


@pytest.mark.parametrize("protocol", ["nature", "machado"])
def test_the_seed_decides_everything(protocol):
    first, again, other = (
        rollout(make_atari_vec_env("breakout", protocol, n_envs=2, seed=seed)) for seed in (7, 7, 8)
    )
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left, right)
    assert any((left != right).any() for left, right in zip(first, other, strict=True))


def test_reset_and_seed_of_sb3():
    env = make_atari_vec_env("pong", n_envs=2)
    env.seed(2**32 - 1)  # SB3 may draw 32 bits
    first = rollout(env, 20)
    env.step_async(np.zeros(2, int))
    env.seed(2**32 - 1)
    for left, right in zip(first, rollout(env, 20), strict=True):  # resets during a step
        np.testing.assert_array_equal(left, right)


def test_observations_stay_as_they_were():
    env = make_atari_vec_env("pong", n_envs=2, seed=0)
    first = env.reset()
    copy = first.copy()
    for _ in range(10):
        env.step([2, 3])
    np.testing.assert_array_equal(first, copy)
    assert env.render().shape == (168, 84, 3)  # two pictures, as large as the agent sees them


@pytest.mark.parametrize("spelling", ["qbert", "Qbert", "Q*bert", "ALE/Qbert-v5"])
def test_games_have_many_spellings(spelling):
    assert make_atari_vec_env(spelling).game == "qbert"


def test_two_words():
    for spelling in ("space_invaders", "SpaceInvaders", "space invaders", "SpaceInvaders-v4"):
        assert atari.rom_name(spelling) == "space_invaders"
    assert atari.rom_name("PongNoFrameskip-v4") == "pong"


def test_bad_input_is_refused_at_once():
    with pytest.raises(ValueError, match=r"'pongg'. Nearest names: pong"):
        make_atari_vec_env("pongg")
    with pytest.raises(ValueError, match="'nature' or 'machado', got 'mnih'"):
        make_atari_vec_env("pong", "mnih")
    with pytest.raises(ValueError, match="n_envs must be at least 1"):
        make_atari_vec_env("pong", n_envs=0)
    env = make_atari_vec_env("pong")
    env.reset()
    for action in (6, -1):
        with pytest.raises(ValueError, match=r"Discrete\(6\)"):
            env.step([action])
    with pytest.raises(ValueError, match="There are 1 games"):
        env.step([0, 1])
    env.step([5])
    assert env.episodes()[0]["actions"] == [5]
    with pytest.raises(AttributeError, match="not Python objects"):
        env.env_method("reset")


def test_sb3_trains_and_evaluates_on_whole_games():
    th.set_num_threads(1)
    env = make_atari_vec_env("breakout", n_envs=2)
    assert stacked_frames(env) == stacked_frames(VecCheckNan(env)) == 4
    model = DQN(
        "CnnPolicy",
        env,
        buffer_size=2000,
        learning_starts=1180,
        train_freq=8,
        batch_size=4,
        replay_buffer_class=FrameReplayBuffer,
        seed=0,
        device="cpu",
    )
    assert model.env is env  # neither transposed nor monitored a second time
    games, lives = [], []

    def watch(local, _):
        games.extend(info["game"]["score"] for info in local["infos"] if "game" in info)
        lives.extend(info["life"]["score"] for info in local["infos"] if "life" in info)
        return True

    model.learn(1200, callback=watch)
    assert [episode["r"] for episode in model.ep_info_buffer] == games
    assert len(games) >= 2
    assert len(lives) >= 5 * len(games)
    model.exploration_rate = 1.0  # a policy that never fires would not end its game
    scores, steps = evaluate_policy(
        model, env, n_eval_episodes=1, deterministic=False, return_episode_rewards=True
    )
    assert len(scores) == 1
    assert steps[0] > 100  # a game of five lives, not a life


@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("name", ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"])
def test_minatar_is_registered(name, caplog):
    every, useful = (gym.make(f"MinAtar/{name}-{version}") for version in ("v0", "v1"))
    assert every.action_space.n == 6 >= useful.action_space.n
    assert every.reset(seed=0)[0].shape[:2] == (10, 10)
    assert "seaborn" not in caplog.text


def test_smoke_minatar_with_mlp_policy():
    model = DQN("MlpPolicy", "MinAtar/Breakout-v1", learning_starts=20, buffer_size=100)
    model.learn(60)


@pytest.mark.parametrize("protocol", ["nature", "machado"])
def test_games_can_be_played_again_up_to_a_moment(protocol, monkeypatch):
    monkeypatch.setattr(atari, "RESEED_STEPS", 250)
    env = make_atari_vec_env("breakout", protocol, n_envs=3, seed=5)
    env.reset()
    rng = np.random.default_rng(2)
    for action in rng.integers(env.action_space.n, size=(700, 3)):
        env.step(action)
    moments = json.loads(json.dumps(env.episodes()))
    assert len({len(moment["actions"]) for moment in moments}) == 3
    copy = make_atari_vec_env("breakout", protocol, n_envs=3, seed=99)
    np.testing.assert_array_equal(copy.replay_episodes(moments), env._obs)
    games = 0
    actions = rng.integers(env.action_space.n, size=(500, 3))
    for action in actions:
        theirs, ours = env.step(action), copy.step(action)
        games += sum("game" in info for info in theirs[3])
        for a, b in zip(ours[:3], theirs[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(ours[3], theirs[3], strict=True):
            assert a.get("life") == b.get("life")
            assert a.get("game") == b.get("game")
    assert games >= 3
    env.close()
    copy.close()
