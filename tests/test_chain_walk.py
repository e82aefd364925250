"""The chain-walk: environment, compiled experiment and exact optimum."""

import dataclasses
import math
import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

from benchmarks.chain import FIXED_BETAS, plain_run
from cbsql.envs.chain_walk import End, Retreat, chain_model
from cbsql.experiments.chain import ChainSpec, optimal_return, run_chain
from cbsql.tabular.chain_walk import Algorithm, Chance, Schedule, simulate
from cbsql.tabular.planning import soft_value_iteration

ENV = "cbsql/ChainWalk-v0"


class Replay:
    """Stands for random.Random in the plain-Python learner, and deals the luck of one run."""

    def __init__(self, chance, run):
        luck = (chance.noise[run], chance.explore[run], chance.coin[run])
        self._luck = zip(*(values.reshape(-1).tolist() for values in luck), strict=True)
        self._next()

    def _next(self):
        self._noise, self._explore, self._coin = next(self._luck, (0, False, 0))

    def random(self):
        return 0.0 if self._explore else 1.0

    def randrange(self, _):
        return self._coin

    def choice(self, best):
        return best[0] if len(best) == 1 else self._coin

    def gauss(self, mean, deviation):
        noise = self._noise
        self._next()
        return mean + deviation * noise


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize("retreat", Retreat)
@pytest.mark.parametrize("beta", FIXED_BETAS)
def test_compiled_learner_is_the_plain_one(beta, retreat, end):
    chance = Chance.draw(np.random.default_rng(7), runs=5, episodes=60, epsilon=0.1)
    if beta is None:
        algorithm = Algorithm("CBSQL", Schedule.count, 0.01)
    else:
        algorithm = Algorithm("SQL", Schedule.constant, beta)
    outcome = simulate(algorithm, chance, retreat=retreat, end=end)
    for run in range(5):
        returns, q = plain_run(
            beta, 60, Replay(chance, run), retreat=retreat.name, terminal=end is End.terminal
        )
        np.testing.assert_allclose(outcome.returns[run], returns, atol=1e-12)
        np.testing.assert_allclose(outcome.q[run], q, rtol=1e-9, atol=1e-9)
    assert (outcome.n.sum(1) == 60 * 5).all()


def test_averages_agree_with_an_independent_simulation():
    """Mean returns of episodes 1-20 and 81-120, against plain Python with its own generator."""
    ours = run_chain(ChainSpec(runs=4000, episodes=120)).returns
    for name, beta in (("Q-learning", math.inf), ("SQL 10", 10.0), ("CBSQL", None)):
        theirs = np.array([plain_run(beta, 120, random.Random(seed))[0] for seed in range(300)])
        for first, last in ((0, 20), (80, 120)):
            a, b = (r[:, first:last].mean(1) for r in (ours[name], theirs))
            error = math.sqrt(a.var() / len(a) + b.var() / len(b))
            assert abs(a.mean() - b.mean()) < 4 * error, (name, first)


def test_the_papers_claim_holds_early_in_training():
    """Count-based temperatures learn fastest of the paper's five, under every reading."""
    for retreat in Retreat:
        for end in End:
            spec = ChainSpec(runs=1000, episodes=40, retreat=retreat.name, end=end.name)
            means = {name: r.mean() for name, r in run_chain(spec).returns.items()}
            assert max(means, key=means.__getitem__) == "CBSQL", (spec, means)


def test_result_does_not_depend_on_the_number_of_threads():
    spec = ChainSpec(runs=1100, episodes=10, all_schedules=True)
    one, three = run_chain(spec, threads=1), run_chain(spec, threads=3)
    for name in one.returns:
        np.testing.assert_array_equal(one.returns[name], three.returns[name])


def test_more_runs_continue_the_same_sequence():
    few, many = (run_chain(ChainSpec(runs=runs, episodes=5)).returns for runs in (500, 700))
    for name in few:
        np.testing.assert_array_equal(few[name], many[name][:500])


def test_noise_is_numpys():
    noise = Chance.draw(np.random.default_rng(0), runs=3, episodes=400, epsilon=0.5).noise
    np.testing.assert_array_equal(noise, np.random.default_rng(0).standard_normal((5, 400, 3)).T)


def test_noise_does_not_depend_on_epsilon():
    careful, random = (
        Chance.draw(np.random.default_rng(0), 3, 4, epsilon) for epsilon in (0.0, 1.0)
    )
    np.testing.assert_array_equal(careful.noise, random.noise)
    np.testing.assert_array_equal(careful.coin, random.coin)
    assert not careful.explore.any()
    assert random.explore.all()


def test_another_seed_is_another_result():
    results = [run_chain(ChainSpec(runs=50, episodes=20, seed=seed)).returns for seed in (0, 1)]
    assert any((results[0][name] != results[1][name]).any() for name in results[0])


def test_linear_schedule_counts_all_updates():
    """With one state visited only (stay, action 0 forced), linear and count-based are one."""
    chance = Chance.draw(np.random.default_rng(0), runs=3, episodes=20, epsilon=1.0)
    chance = dataclasses.replace(chance, coin=np.zeros_like(chance.coin))
    linear, count = (
        simulate(Algorithm("", schedule, 0.3), chance, retreat=Retreat.stay)
        for schedule in (Schedule.linear, Schedule.count)
    )
    np.testing.assert_array_equal(linear.q, count.q)


def test_gap_schedule_is_two_mu_over_sigma_squared():
    """One more step after 20 episodes must back up with the beta of the targets seen so far."""
    chance = Chance.draw(np.random.default_rng(3), runs=1, episodes=20, epsilon=1.0)
    before = simulate(Algorithm("", Schedule.gap), chance, retreat=Retreat.stay)
    targets: dict[tuple[int, int], list[float]] = {}
    q = np.zeros((5, 2))
    for noise, coin in zip(chance.noise[0], chance.coin[0], strict=True):
        state = 0
        for step in range(5):
            action = int(coin[step])
            after = min(state + action, 4)
            seen = [targets.get((after, a), []) for a in (0, 1)]
            if min(map(len, seen)) < 2:
                beta = 0.0
            else:
                sigma2 = sum(np.var(s, ddof=1) / len(s) for s in seen)
                beta = 2 * abs(np.mean(seen[1]) - np.mean(seen[0])) / sigma2
            soft = q[after].mean() if beta == 0 else _mellowmax(q[after], beta)
            reward = (1.0 if (state, action) == (4, 1) else -0.1) + noise[step]
            q[state, action] = reward + 0.99 * soft
            targets.setdefault((state, action), []).append(q[state, action])
            state = after
    np.testing.assert_allclose(before.q[0], q, rtol=1e-8, atol=1e-8)


def test_psi_learning_multiplies_the_policy_by_the_advantage():
    """One update of (s, a): log pi changes by kappa (target - V(s)), before normalising."""
    chance = Chance.draw(np.random.default_rng(5), runs=1, episodes=6, epsilon=1.0)
    kappa, psi = 0.3, np.zeros((5, 2))  # log of the policy before normalising
    for noise, coin in zip(chance.noise[0], chance.coin[0], strict=True):
        state = 0
        for step in range(5):
            action = int(coin[step])
            after = min(state + 1, 4) if action else max(state - 1, 0)
            reward = (1.0 if (state, action) == (4, 1) else -0.1) + noise[step]
            free = np.log(np.exp(psi).mean(1))  # (states,)
            psi[state, action] += kappa * reward + 0.99 * free[after] - free[state]
            state = after
    outcome = simulate(Algorithm("", Schedule.trust_region, kappa), chance)
    np.testing.assert_allclose(kappa * outcome.q[0], psi, rtol=1e-9, atol=1e-9)


def _mellowmax(values, beta):
    return values.max() + np.log(np.exp(beta * (values - values.max())).mean()) / beta


@pytest.mark.parametrize("end", End.__members__)
@pytest.mark.parametrize("retreat", Retreat.__members__)
def test_environment_is_valid(retreat, end):
    env = gym.make(ENV, retreat=retreat, end=end).unwrapped
    check_env(env, skip_render_check=True)
    check_env_of_sb3(env)


@pytest.mark.parametrize(("retreat", "path"), [("back", [1, 2, 1]), ("stay", [1, 2, 2])])
def test_environment_moves_as_documented(retreat, path):
    env = gym.make(ENV, retreat=retreat, noise=0.0)
    env.reset(seed=0)
    assert [int(env.step(action)[0]) for action in (1, 1, 0)] == path


@pytest.mark.parametrize("end", End.__members__)
def test_forward_earns_the_optimum_and_ends_after_five_steps(end):
    env = gym.make(ENV, end=end, noise=0.0)
    state, _ = env.reset()
    total, terminated, truncated = 0.0, False, False
    visited = []
    while not (terminated or truncated):
        visited.append(int(state))
        state, reward, terminated, truncated, _ = env.step(1)
        total += float(reward)
    assert visited == [0, 1, 2, 3, 4]
    assert total == pytest.approx(0.6)
    assert (terminated, truncated) == (end == "terminal", end == "timelimit")


def test_noise_is_standard_normal_around_the_expected_reward():
    env = gym.make(ENV)
    env.reset(seed=1)
    noise = []
    for _ in range(2000):
        _, reward, _, over, info = env.step(0)
        noise.append(float(reward) - info["expected_reward"])
        if over:
            env.reset()
    assert abs(np.mean(noise)) < 4 / math.sqrt(2000)
    assert abs(np.var(noise) - 1) < 4 * math.sqrt(2 / 2000)


@pytest.mark.parametrize("retreat", Retreat)
def test_optimum_is_the_papers(retreat):
    assert optimal_return(retreat) == pytest.approx(0.6)


def test_soft_value_iteration_solves_its_equation_and_knows_its_limits():
    model, rewards = chain_model(Retreat.back)
    for beta in (0.0, 1.0, 100.0, math.inf):
        q = soft_value_iteration(model, rewards, gamma=0.9, beta=beta)
        soft = [
            row.mean() if beta == 0 else row.max() if beta == math.inf else _mellowmax(row, beta)
            for row in q
        ]
        np.testing.assert_allclose(q, rewards + 0.9 * model @ np.array(soft), atol=1e-12)
    assert q[4, 1] == pytest.approx(1 / (1 - 0.9))  # +1 for ever


@pytest.mark.parametrize(
    "arguments", [{"retreat": "up"}, {"end": "never"}, {"noise": -1.0}, {"noise": math.nan}]
)
def test_environment_refuses_bad_arguments(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        gym.make(ENV, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"runs": 0},
        {"episodes": -1},
        {"retreat": "up"},
        {"end": ""},
        {"kappa": -0.01},
        {"kappa": math.nan},
        {"gamma": 1.0},
        {"epsilon": 2.0},
        {"learning_rate": 0.0},
        {"seed": -1},
    ],
)
def test_spec_refuses_bad_arguments(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ChainSpec(**arguments)
