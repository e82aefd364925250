"""Rainbow and Munchausen: targets and losses against loops, and the known faults of others."""

import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from test_sql import QUICK, same, weights

from cbsql import Munchausen, Rainbow
from cbsql.envs import make_atari_vec_env
from cbsql.experiments.spec import RunSpec, preset
from cbsql.replay import PrioritizedFrameReplayBuffer, PrioritizedReplayBuffer
from cbsql.temperature import Constant, CountBased, Greedy, Linear

PARTS = ("double", "prioritized", "dueling", "categorical", "noisy")
SMALL = {**QUICK, "policy_kwargs": {"net_arch": [16]}}


def short_cartpole(n_envs=1):
    return make_vec_env(lambda: TimeLimit(gym.make("CartPole-v1"), 9), n_envs=n_envs)


def test_with_everything_off_it_is_sb3s_dqn_bit_for_bit():
    arguments = {"learning_starts": 50, "train_freq": 1, "target_update_interval": 50, "seed": 3}
    dqn = DQN("MlpPolicy", "CartPole-v1", **arguments).learn(350)
    off = dict.fromkeys(PARTS, False)
    rainbow = Rainbow("MlpPolicy", "CartPole-v1", n_steps=1, loss="huber", **off, **arguments)
    rainbow.learn(350)
    for ours, theirs in zip(weights(rainbow), weights(dqn), strict=True):
        assert th.equal(ours, theirs)


def project(distribution, atoms, reward, discount, cost):
    """Hessel et al.'s projection, atom by atom."""
    low, high = atoms[0], atoms[-1]
    gap = (high - low) / (len(atoms) - 1)
    out = np.zeros(len(atoms))
    for atom, probability in zip(atoms, distribution, strict=True):
        value = min(max(reward + discount * (atom - cost), low), high)
        position = (value - low) / gap
        below, above = math.floor(position + 1e-9), math.ceil(position - 1e-9)
        if below == above:
            out[below] += probability
        else:
            out[below] += probability * (above - position)
            out[above] += probability * (position - below)
    return out


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("beta", [0.5, 5.0, math.inf])
def test_categorical_target_against_a_loop(beta, double):
    temperature = Greedy() if beta == math.inf else Constant(beta)
    model = Rainbow(
        *("MlpPolicy", short_cartpole()), temperature=temperature, double=double, n_steps=3, **SMALL
    ).learn(60)
    with th.no_grad():  # so that the two networks disagree
        for parameter in model.q_net_target.parameters():
            parameter.add_(th.randn_like(parameter) * 0.3)
    batch, _ = model._sample(32)
    with th.no_grad():
        target = model._target(batch, beta).double().numpy()
        # The noise of the target stays in place until the next one.
        online = model.q_net.logits(batch.next_observations).softmax(-1).double().numpy()
        judge = model.q_net_target.logits(batch.next_observations).softmax(-1).double().numpy()
    atoms = model.q_net.atoms.double().numpy()
    for i in range(32):
        q = (online if double else judge)[i] @ atoms
        if beta == math.inf:
            policy = (q == q.max()).astype(float)
            cost = 0.0
        else:
            policy = np.exp(beta * (q - q.max()))
            policy /= policy.sum()
            cost = float((policy * np.log(2 * policy)).sum()) / beta
        discount = float(batch.discounts[i]) * (1 - float(batch.dones[i]))
        mixed = policy @ judge[i]
        wanted = project(mixed, atoms, float(batch.rewards[i]), discount, cost)
        np.testing.assert_allclose(target[i], wanted, atol=2e-5)
    assert len(set(batch.discounts.flatten().tolist())) == 3  # one, two and three steps
    assert 0 < batch.dones.sum() < 32


@pytest.mark.parametrize("categorical", [True, False])
def test_loss_is_weighted_and_becomes_the_priority(categorical):
    model = Rainbow("MlpPolicy", short_cartpole(), categorical=categorical, **SMALL).learn(60)
    model._current_progress_remaining = 0.5
    batch, _ = model._sample(16)
    assert model.replay_buffer.importance_exponent == pytest.approx(0.7)
    assert len(batch.weights.unique()) > 1
    with th.no_grad():
        target = model._target(batch, math.inf)
        loss = float(model._loss(batch, target))
        actions = batch.actions.flatten().tolist()
        if categorical:
            log_probs = model.q_net.logits(batch.observations).log_softmax(-1)
            errors = [
                sum(
                    float(p) * (math.log(p) - float(log_probs[i, actions[i], j]))
                    for j, p in enumerate(target[i].tolist())
                    if p > 0
                )
                for i in range(16)
            ]
            losses = errors
        else:
            q = model.q_net(batch.observations)
            errors = [abs(float(q[i, actions[i]] - target[i])) for i in range(16)]
            losses = [error**2 for error in errors]
    weighted = [w * x for w, x in zip(batch.weights.flatten().tolist(), losses, strict=True)]
    assert loss == pytest.approx(np.mean(weighted), rel=1e-3)
    last = dict(zip(batch.indices.tolist(), errors, strict=True))  # the later of two counts
    leaves = model.replay_buffer._tree.get(list(last))
    np.testing.assert_allclose(leaves, np.sqrt(list(last.values())), rtol=2e-3, atol=2e-3)


class Generators(BaseCallback):
    """The state of the acting network's noise after every step."""

    def _on_training_start(self):
        self.states = []

    def _on_step(self):
        self.states.append(self.model.q_net.generator.get_state().numpy().tobytes())
        return True


def test_a_perfect_prediction_has_a_priority_in_spite_of_rounding():
    model = Rainbow("MlpPolicy", short_cartpole(), noisy=False, **SMALL).learn(60)
    batch, _ = model._sample(256)
    rows = th.arange(256)
    with th.no_grad():
        log_probs = model.q_net.logits(batch.observations).log_softmax(-1)[
            rows, batch.actions.flatten()
        ]
        target = (log_probs + 1e-6 * th.randn_like(log_probs)).softmax(1)
    divergence = th.nn.functional.kl_div(log_probs, target, reduction="none").sum(1)
    assert divergence.min() < 0
    assert float(model._loss(batch, target)) == pytest.approx(0, abs=1e-6)


def test_noise_is_new_for_every_acting_step_from_the_first_on():
    seen = Generators()
    Rainbow("MlpPolicy", "CartPole-v1", **{**SMALL, "learning_starts": 50}).learn(80, callback=seen)
    assert len(set(seen.states)) == 80


def test_noise_explores_and_is_off_in_evaluation():
    # Far from a tie of the mean actions, only noise can change the action.
    model = Rainbow("MlpPolicy", "CartPole-v1", **SMALL)
    with th.no_grad():
        for layer in model.q_net.noisy_layers:
            layer.weight_sigma.mul_(10)
    observation = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    assert len({int(model.predict(observation)[0]) for _ in range(50)}) == 2
    assert len({int(model.predict(observation, deterministic=True)[0]) for _ in range(50)}) == 1


def test_each_update_has_its_own_noise_in_both_networks():
    seen = []

    class Watched(Rainbow):
        def _target(self, batch, beta):
            target = super()._target(batch, beta)
            seen.extend(network.advantage[-1].noise for network in (self.q_net, self.q_net_target))
            return target

        def _loss(self, batch, target):
            loss = super()._loss(batch, target)
            seen.append(self.q_net.advantage[-1].noise)
            return loss

    model = Watched("MlpPolicy", "CartPole-v1", **SMALL).learn(40)
    assert len(seen) == 3 * model._n_updates == 60
    assert len({noise.numpy().tobytes() for noise in seen}) == len(seen)


def test_the_number_of_steps_is_the_papers():
    steps = [
        Rainbow("MlpPolicy", "CartPole-v1", temperature=temperature).n_steps
        for temperature in (None, Greedy(), Constant(100), CountBased())
    ]
    assert steps == [4, 4, 1, 1]


def test_replay_is_chosen_by_the_observations():
    model = Rainbow("MlpPolicy", "CartPole-v1", **SMALL)
    assert type(model.replay_buffer) is PrioritizedReplayBuffer
    assert model.replay_buffer.n_steps == 4
    env = make_atari_vec_env("breakout", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Rainbow("CnnPolicy", env, buffer_size=1000, priority_exponent=0.3)
    env.close()
    assert type(model.replay_buffer) is PrioritizedFrameReplayBuffer
    assert model.replay_buffer.priority_exponent == 0.3


@pytest.mark.parametrize("off", PARTS)
@pytest.mark.parametrize("temperature", [Greedy, CountBased])
def test_smoke_each_part_can_be_turned_off(off, temperature, tmp_path):
    model = Rainbow(
        *("MlpPolicy", short_cartpole(2)), temperature=temperature(), **{off: False}, **SMALL
    ).learn(60)
    observation = np.zeros((5, 4), np.float32)
    model.save(tmp_path / "model")
    loaded = Rainbow.load(tmp_path / "model", env=short_cartpole(2))
    assert same(weights(model), weights(loaded))
    assert loaded.n_steps == model.n_steps
    assert (
        loaded.predict(observation, deterministic=True)[0].tolist()
        == model.predict(observation, deterministic=True)[0].tolist()
    )
    loaded.learn(30, reset_num_timesteps=False)
    assert type(loaded.replay_buffer) is type(model.replay_buffer)


def test_load_takes_the_policy_kwargs_of_the_constructor(tmp_path):
    Rainbow("MlpPolicy", "CartPole-v1", noisy=False, **SMALL).save(tmp_path / "model")
    loaded = Rainbow.load(tmp_path / "model", policy_kwargs=SMALL["policy_kwargs"])
    assert not loaded.q_net.parts.noisy
    with pytest.raises(ValueError, match=r"not those specified: {'net_arch': \[8\]}"):
        Rainbow.load(tmp_path / "model", policy_kwargs={"net_arch": [8]})


def test_presets_are_the_papers_third_table():
    spec = RunSpec("breakout", "rainbow-cbsql", settings={"buffer_size": 1000})
    from cbsql.experiments.runner import make_env, make_model

    env = make_env(spec)
    model = make_model(spec, env)
    greedy = make_model(RunSpec("breakout", "rainbow", settings={"buffer_size": 1000}), env)
    env.close()
    assert (model.gamma, model.batch_size, model.lr_schedule(1)) == (0.99, 32, 6.25e-5)
    assert preset(spec).settings["buffer_size"] == 1_000_000
    convolutions = [m for m in model.q_net.modules() if isinstance(m, th.nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [32, 32, 64]
    assert [m.kernel_size for m in convolutions] == [(8, 8), (4, 4), (3, 3)]
    assert [m.stride for m in convolutions] == [(4, 4), (2, 2), (1, 1)]
    assert model.q_net.value[0].out_features == model.q_net.advantage[0].out_features == 512
    assert model.q_net.parts.sigma0 == 0.5
    atoms = model.q_net.atoms
    assert (len(atoms), float(atoms[0]), float(atoms[-1])) == (51, -10, 10)
    assert (model.n_steps, greedy.n_steps) == (1, 4)
    assert isinstance(model.policy.optimizer, th.optim.Adam)
    assert model.policy.optimizer.defaults["eps"] == 1.5e-4
    assert model.exploration_rate == model.exploration_schedule(1) == 0


def test_what_is_given_reaches_a_buffer_that_is_given():
    model = Rainbow(
        "MlpPolicy",
        "CartPole-v1",
        replay_buffer_class=PrioritizedReplayBuffer,
        priority_exponent=0.9,
        **SMALL,
    )
    assert (model.replay_buffer.n_steps, model.replay_buffer.priority_exponent) == (4, 0.9)
    assert isinstance(Rainbow("MlpPolicy", "CartPole-v1", beta=None, **SMALL).temperature, Greedy)


def test_dict_observations_have_one_step_returns_with_or_without_priorities():
    env = BitFlippingEnv(n_bits=3)
    for prioritized in (True, False):
        with pytest.warns(UserWarning, match="with one-step returns"):
            model = Rainbow("MultiInputPolicy", env, prioritized=prioritized, **SMALL)
        assert model.n_steps == 1
        model.learn(30)


def test_munchausen_target_against_a_loop():
    for name in ("double", "soft_n_step"):
        with pytest.raises(ValueError, match=f"defined without {name}"):
            Munchausen("MlpPolicy", short_cartpole(), **{name: True}, **SMALL)
    model = Munchausen("MlpPolicy", short_cartpole(), **SMALL).learn(60)
    with th.no_grad():
        for parameter in model.q_net_target.parameters():
            parameter.add_(th.randn_like(parameter) * 0.3)
    batch, _ = model._sample(16)
    with th.no_grad():
        target = model._target(batch, model._beta(batch.next_observations))
        q = model.q_net_target(batch.observations).double().tolist()
        next_q = model.q_net_target(batch.next_observations).double().tolist()
    bonuses = []
    for i in range(16):
        tau = 0.03
        action = int(batch.actions[i])
        normaliser = math.fsum(math.exp((x - max(q[i])) / tau) for x in q[i])
        log_pi = (q[i][action] - max(q[i])) / tau - math.log(normaliser)
        bonuses.append(max(tau * log_pi, -1.0))
        normaliser = math.fsum(math.exp((x - max(next_q[i])) / tau) for x in next_q[i])
        value = 0.0
        for x in next_q[i]:
            pi = math.exp((x - max(next_q[i])) / tau) / normaliser
            value += pi * (x - tau * math.log(pi)) if pi > 0 else 0
        wanted = float(batch.rewards[i]) + 0.9 * bonuses[-1]
        wanted += 0.99 * (1 - float(batch.dones[i])) * value
        assert float(target[i]) == pytest.approx(wanted, abs=1e-4)
    assert min(bonuses) < -0.01


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"soft_n_step": True, "temperature": Constant(3)}, "give n_steps above 1"),
        ({"priority_exponent": 2.0}, "priority_exponent must be from 0 to 1"),
        ({"policy_kwargs": {"v_min": 1.0, "v_max": -1.0}}, "must be less than v_max"),
        ({"policy_kwargs": {"noisy": False}}, "give it noisy=False as an argument of its own"),
    ],
)
def test_bad_input_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        Rainbow("MlpPolicy", "CartPole-v1", **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Greedy, lambda: Constant(100), CountBased])
def test_learns_cartpole(make):
    spec = RunSpec("CartPole-v1", "rainbow")
    base = preset(spec)
    model = Rainbow(base.policy, "CartPole-v1", temperature=make(), seed=0, **base.settings)
    model.learn(50_000)
    assert np.mean([info["r"] for info in model.ep_info_buffer]) > 150


def test_exponents_for_the_buffer_are_those_of_the_model():
    given = {"importance_exponent": 1.0, "priority_exponent": 0.25}
    model = Rainbow("MlpPolicy", short_cartpole(), replay_buffer_kwargs=given, **SMALL).learn(60)
    assert (model.importance_exponent, model.priority_exponent) == (1.0, 0.25)
    buffer = model.replay_buffer
    assert (buffer.importance_exponent, buffer.priority_exponent) == (1.0, 0.25)


@pytest.mark.parametrize("temperature", [CountBased(), Linear(1.0), Greedy()])
def test_munchausen_has_a_constant_temperature(temperature, tmp_path):
    Munchausen("MlpPolicy", short_cartpole(), **SMALL).save(tmp_path / "m")
    with pytest.raises(ValueError, match="defined with a Constant temperature"):
        Munchausen.load(tmp_path / "m", temperature=temperature)
