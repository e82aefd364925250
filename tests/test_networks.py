"""Rainbow's networks: against the formulas of the papers, closed forms and SB3's own network."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.dqn.policies import DQNPolicy

from cbsql.deep.networks import MinAtarCNN, NoisyLinear, RainbowCNN
from cbsql.deep.policies import (
    CnnPolicy,
    MlpPolicy,
    MultiInputPolicy,
    RainbowNetwork,
    RainbowPolicy,
)

VECTOR = spaces.Box(-1, 1, (7,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
MINATAR = spaces.Box(0, 1, (10, 10, 6), bool)
DICT = spaces.Dict({"image": IMAGE, "vector": VECTOR})
ACTIONS = spaces.Discrete(5)
OFF = {"dueling": False, "categorical": False, "noisy": False}
ALL_PARTS = [
    dict(zip(OFF, values, strict=True)) for values in itertools.product([True, False], repeat=3)
]


def policy_of(policy_class=MlpPolicy, space=VECTOR, seed=0, **kwargs) -> RainbowPolicy:
    th.manual_seed(seed)
    return policy_class(space, ACTIONS, lambda _: 1e-3, **kwargs)


def observations(space=VECTOR, rows=3, seed=0):
    space.seed(seed)
    samples = [space.sample() for _ in range(rows)]
    if isinstance(space, spaces.Dict):
        return {k: th.as_tensor(np.stack([s[k] for s in samples])) for k in space.spaces}
    return th.as_tensor(np.stack(samples))


def numpy_of(obs):
    return {k: v.numpy() for k, v in obs.items()} if isinstance(obs, dict) else obs.numpy()


def noisy_layer(inputs=4, outputs=3, seed=0, spread=0.3):
    """One whose sigmas are all different, so that none can stand for another."""
    th.manual_seed(seed)
    layer = NoisyLinear(inputs, outputs)
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        sigma.data += spread * th.rand_like(sigma)
    return layer


def textbook(layer, x, noise):
    """With the matrix of noisy weights: equations 9 to 11 of Fortunato et al. (2018)."""
    f = [math.copysign(math.sqrt(abs(e)), e) for e in noise.tolist()]
    f_in, f_out = th.tensor(f[: x.shape[1]]), th.tensor(f[x.shape[1] :])
    weight = layer.weight + layer.weight_sigma * th.outer(f_out, f_in)
    bias = layer.bias + layer.bias_sigma * f_out
    return x @ weight.T + bias


@pytest.mark.parametrize("rows", [1, 6, 40])  # on activations, or on weights
def test_noise_is_that_of_the_textbook(rows):
    layer, x = noisy_layer(), th.randn(rows, 4)
    layer.reset_noise(th.Generator().manual_seed(3))
    drawn = th.randn(7, generator=th.Generator().manual_seed(3))
    ours, theirs = layer(x), textbook(layer, x, drawn)
    th.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    parameters = list(layer.parameters())
    goal = th.randn(rows, 3)
    for a, b in zip(
        th.autograd.grad(((ours - goal) ** 2).sum(), parameters),
        th.autograd.grad(((theirs - goal) ** 2).sum(), parameters),
        strict=True,
    ):
        assert float(a.abs().min()) > 0
        th.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def in_double(layer, x):
    """With an explicit matrix of weights in double precision, and what autograd says about it."""
    weight, sigma, bias, bias_sigma = (
        p.detach().double().requires_grad_()
        for p in (layer.weight, layer.weight_sigma, layer.bias, layer.bias_sigma)
    )
    f_in, f_out = layer.noise[0].double().split([layer.in_features, layer.out_features])
    x = x.detach().double().requires_grad_()
    y = x @ (weight + sigma * th.outer(f_out, f_in)).T + bias + bias_sigma * f_out
    return y, (x, weight, sigma, bias, bias_sigma)


@pytest.mark.parametrize("guard", [th.no_grad, th.inference_mode])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 2), (64, 51), (700, 130)])
def test_one_row_without_a_gradient(inputs, outputs, guard):
    layer = noisy_layer(inputs, outputs)
    layer.reset_noise()
    with guard():
        x = th.randn(3, inputs)
        for row in (x[:1], x.T.contiguous().T[2:], th.zeros(1, inputs)):
            assert layer(row).dtype == th.float32
            wanted, _ = in_double(layer, row.clone())
            th.testing.assert_close(layer(row).double(), wanted.detach(), rtol=1e-5, atol=1e-5)


def test_other_kinds_of_numbers_are_left_to_torch():
    layer = noisy_layer(40, 30).double()
    layer.reset_noise()
    for rows in (1, 20):
        with th.no_grad():
            x = th.randn(rows, 40, dtype=th.float64)
            th.testing.assert_close(layer(x), in_double(layer, x)[0].detach())


@pytest.mark.parametrize("of_x", [True, False])
def test_a_batch_and_its_gradient_in_double_precision(of_x):
    layer, x = noisy_layer(700, 130), th.randn(33, 700).relu().requires_grad_(of_x)
    layer.reset_noise()
    wanted, leaves = in_double(layer, x)
    goal = th.randn(33, 130)
    ours = layer(x)
    th.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-4)
    (ours * goal).sum().backward()
    (wanted * goal).sum().backward()
    parameters = (layer.weight, layer.weight_sigma, layer.bias, layer.bias_sigma)
    for mine, its in zip((x, *parameters)[not of_x :], leaves[not of_x :], strict=True):
        assert mine.grad.abs().max() > 0
        th.testing.assert_close(mine.grad.double(), its.grad, rtol=1e-4, atol=1e-4)


def test_each_row_may_have_noise_of_its_own():
    layer, x = noisy_layer(), th.randn(40, 4)
    layer.reset_noise(th.Generator().manual_seed(3), rows=40)
    drawn = th.randn(40, 7, generator=th.Generator().manual_seed(3))
    each = th.cat([textbook(layer, x[i : i + 1], drawn[i]) for i in range(40)])
    th.testing.assert_close(layer(x), each, rtol=0, atol=1e-6)


def test_mean_and_variance_of_the_output():
    """f(e) has mean 0 and variance E|e| = sqrt(2 / pi), and the factors are independent."""
    layer, x = noisy_layer(), th.randn(1, 4)
    rows = 200_000
    layer.reset_noise(th.Generator().manual_seed(0), rows)
    with th.no_grad():
        samples = layer(x.expand(rows, -1)).double()
        mean = (x @ layer.weight.T + layer.bias)[0].double()
        v = math.sqrt(2 / math.pi)
        variance = v * (v * (x**2 @ (layer.weight_sigma**2).T) + layer.bias_sigma**2)[0].double()
    error = (samples.mean(0) - mean) / (variance / rows).sqrt()
    assert float(error.abs().max()) < 4  # standard errors
    th.testing.assert_close(samples.var(0), variance, rtol=0.02, atol=0)


def test_initial_values():
    th.manual_seed(0)
    layer = NoisyLinear(400, 50, sigma0=0.3)
    for mean in (layer.weight.detach(), layer.bias.detach()):
        assert float(mean.abs().max()) <= 1 / 20
        assert float(mean.std()) == pytest.approx(1 / 20 / math.sqrt(3), rel=0.15)  # uniform
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        assert th.equal(sigma, th.full_like(sigma, 0.3 / 20))


def test_no_noise_before_it_is_drawn_nor_when_it_is_taken_away():
    layer, x = noisy_layer(), th.randn(6, 4)
    plain = th.nn.Linear(4, 3)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    assert th.equal(layer(x), plain(x))
    layer.reset_noise()
    assert not th.equal(layer(x), plain(x))
    layer.noise = None
    assert th.equal(layer(x), plain(x))


def test_noise_stays_until_reset_and_comes_from_the_generator():
    net, obs = policy_of().q_net, observations()
    state, before = net.generator.get_state(), net(obs)
    assert th.equal(net(obs), before)
    assert th.equal(net.generator.get_state(), state)
    net.reset_noise()
    after = net(obs)
    assert not th.equal(after, before)
    th.manual_seed(99)  # not from the global one
    net.generator.set_state(state)
    net.reset_noise()
    assert th.equal(net(obs), after)


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_does_not_switch_noise(training):
    policy, obs = policy_of(), observations()
    before = policy.q_net(obs)
    policy.set_training_mode(training)
    assert th.equal(policy.q_net(obs), before)


def test_every_network_has_noise_of_its_own():
    policy, obs = policy_of(), observations()
    assert not th.equal(policy.q_net(obs), policy.q_net_target(obs))
    with policy.q_net.temporary_noise(0), policy.q_net_target.temporary_noise(0):
        assert th.equal(policy.q_net(obs), policy.q_net_target(obs))
    copied = copy.deepcopy(policy.q_net_target)
    before = policy.q_net_target(obs)
    assert th.equal(copied(obs), before)
    copied.reset_noise()
    assert not th.equal(copied(obs), before)
    assert th.equal(policy.q_net_target(obs), before)
    policy.q_net_target.reset_noise()
    assert th.equal(policy.q_net_target(obs), copied(obs))  # a copy continues in the same way


def test_a_policy_resets_the_noise_of_both_networks():
    policy, obs = policy_of(), observations()
    before = policy.q_net(obs), policy.q_net_target(obs)
    policy.reset_noise()
    for net, value in zip((policy.q_net, policy.q_net_target), before, strict=True):
        assert not th.equal(net(obs), value)


def test_the_target_network_copies_means_and_sigmas():
    policy, obs = policy_of(seed=1), observations()
    for parameter in policy.q_net.parameters():
        parameter.data += 0.1 * th.rand_like(parameter)
    polyak_update(policy.q_net.parameters(), policy.q_net_target.parameters(), 1.0)
    policy.q_net_target.generator.set_state(policy.q_net.generator.get_state())
    policy.reset_noise()
    assert th.equal(policy.q_net(obs), policy.q_net_target(obs))


def test_deterministic_actions_are_those_of_the_mean_weights():
    policy, obs = policy_of(sigma0=20.0), observations(rows=64)
    state = policy.q_net.generator.get_state()
    plain = policy_of(noisy=False)
    plain.q_net.load_state_dict(policy.q_net.state_dict(), strict=False)  # the means
    expected = plain.q_net(obs).argmax(1).numpy()
    actions, _ = policy.predict(obs.numpy(), deterministic=True)
    assert actions.tolist() == expected.tolist()
    assert th.equal(policy.q_net.generator.get_state(), state)
    assert policy(obs, deterministic=True).tolist() == expected.tolist()


def test_exploring_draws_new_noise_for_each_action_and_environment():
    """Five hundred times the same observation: each row and each call decides anew."""
    policy, obs = policy_of(sigma0=20.0), observations(rows=1).expand(500, -1)
    learner = policy.q_net(obs)
    first, second = (policy.predict(obs.numpy(), deterministic=False)[0] for _ in range(2))
    assert first.tolist() != second.tolist()
    assert set(first) == set(second) == set(range(5))
    assert th.equal(policy.q_net(obs), learner)  # which keeps the noise of its gradient step


def test_exploring_acts_by_noisy_values():
    policy, obs = policy_of(sigma0=20.0), observations(rows=1)
    twin = copy.deepcopy(policy.q_net)
    for _ in range(20):
        twin.reset_noise()  # one row, as for one environment
        action, _ = policy.predict(obs.numpy(), deterministic=False)
        assert action.tolist() == twin(obs).argmax(1).tolist()


def test_noise_is_back_after_an_error():
    policy, obs = policy_of(), observations()
    before = policy.q_net(obs)
    with pytest.raises(KeyError), policy.q_net.temporary_noise(0):
        raise KeyError
    assert th.equal(policy.q_net(obs), before)


@pytest.mark.parametrize("parts", ALL_PARTS)
def test_values_are_those_of_the_formulas(parts):
    """Layer by layer with NumPy, at the mean weights, from the saved parameters."""
    net, obs = policy_of(**parts, net_arch=[16, 8]).q_net, observations()
    weights = {name: value.double().numpy() for name, value in net.state_dict().items()}
    n_atoms = 51 if parts["categorical"] else 1

    def layer(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def stream(x, name):
        return layer(np.maximum(layer(x, f"{name}.0"), 0), f"{name}.2")

    shared = np.maximum(layer(obs.double().numpy(), "shared.0"), 0)
    q = stream(shared, "advantage").reshape(3, 5, n_atoms)
    if parts["dueling"]:
        value, advantage = stream(shared, "value"), q.copy()
        for row, action, atom in np.ndindex(q.shape):
            q[row, action, atom] = (
                value[row, atom]
                + advantage[row, action, atom]
                - sum(advantage[row, b, atom] for b in range(5)) / 5
            )
    with net.temporary_noise(0), th.no_grad():
        if parts["categorical"]:
            probs = np.exp(q) / np.exp(q).sum(-1, keepdims=True)
            assert net.logits(obs).softmax(-1).numpy() == pytest.approx(probs, abs=1e-6)
            q = (probs * np.linspace(-10, 10, 51)).sum(-1)
        assert net(obs).numpy() == pytest.approx(q.reshape(3, 5), abs=1e-5)


def test_expected_values_at_the_same_noise_as_the_distributions():
    net, obs = policy_of(n_atoms=11, v_min=-2.0, v_max=3.0).q_net, observations()
    log_probs = net.logits(obs).log_softmax(-1)
    assert log_probs.shape == (3, 5, 11)
    th.testing.assert_close(log_probs.exp().sum(-1), th.ones(3, 5))
    atoms = th.tensor([-2.0 + 0.5 * i for i in range(11)])
    th.testing.assert_close(net.atoms, atoms)
    th.testing.assert_close(net(obs), (log_probs.exp() * atoms).sum(-1))


@pytest.mark.parametrize("net_arch", [[], [32], [64, 48, 32]])
def test_with_all_parts_off_it_is_the_network_of_dqn_from_the_same_seed(net_arch):
    ours, obs = policy_of(**OFF, net_arch=net_arch), observations()
    theirs = policy_of(DQNPolicy, net_arch=net_arch)
    for a, b in zip(ours.q_net.parameters(), theirs.q_net.parameters(), strict=True):
        assert th.equal(a, b)
    assert th.equal(ours.q_net(obs), theirs.q_net(obs))
    with pytest.raises(ValueError, match="categorical"):
        ours.q_net.logits(obs).log_softmax(-1)


def test_the_network_for_minatar_is_a_convolution_and_a_hidden_layer():
    network = MinAtarCNN(MINATAR)
    images = observations(MINATAR).float().requires_grad_()
    seen = th.relu(network.convolution(images.permute(0, 3, 1, 2)))  # Torch's own
    features = th.relu(network.hidden(seen.permute(0, 2, 3, 1).flatten(1)))
    wanted = [*network.parameters(), images]
    weights = th.randn_like(features)
    expected = th.autograd.grad((features * weights).sum(), wanted)
    given = th.autograd.grad((network(images) * weights).sum(), wanted)
    th.testing.assert_close(network(images), features)
    for ours, theirs in zip(given, expected, strict=True):
        th.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("parts", ALL_PARTS)
@pytest.mark.parametrize(
    ("policy_class", "space", "kwargs"),
    [
        (MlpPolicy, VECTOR, {}),
        (CnnPolicy, IMAGE, {}),
        (CnnPolicy, IMAGE, {"features_extractor_class": NatureCNN}),
        (CnnPolicy, MINATAR, {"features_extractor_class": MinAtarCNN, "net_arch": []}),
        (MultiInputPolicy, DICT, {}),
    ],
)
def test_policies_save_load_and_learn_in_all_their_parts(
    policy_class, space, kwargs, parts, tmp_path
):
    policy, obs = policy_of(policy_class, space, **kwargs, **parts), observations(space)
    q = policy.q_net(obs)
    assert q.shape == (3, 5)
    if parts["categorical"]:
        q = (
            q + policy.q_net.logits(obs).log_softmax(-1)[..., 0]
        )  # the value stream cancels out of no atom
    (q * th.randn(3, 5)).sum().backward()
    for name, parameter in policy.q_net.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name

    for parameter in policy.parameters():
        parameter.data += 0.01 * th.randn_like(parameter)
    policy.save(tmp_path / "policy")
    loaded = policy_class.load(tmp_path / "policy")
    assert loaded._get_constructor_parameters()["noisy"] is parts["noisy"]
    for name in ("q_net", "q_net_target"):
        first, second = getattr(policy, name), getattr(loaded, name)
        with first.temporary_noise(0), second.temporary_noise(0), th.no_grad():
            assert th.equal(first(obs), second(obs))
            assert not th.equal(policy.q_net(obs), policy.q_net_target(obs))
    actions = (p.predict(numpy_of(obs), deterministic=True)[0].tolist() for p in (policy, loaded))
    assert next(actions) == next(actions)


def test_what_is_not_default_is_saved(tmp_path):
    numbers = {"n_atoms": 21, "v_min": 0.0, "v_max": 4.0, "sigma0": 0.1, "dueling": False}
    policy = policy_of(net_arch=[8], **numbers)
    policy.save(tmp_path / "policy")
    loaded = RainbowPolicy.load(tmp_path / "policy")
    assert numbers.items() <= loaded._get_constructor_parameters().items()
    assert th.equal(loaded.q_net.atoms, th.linspace(0, 4, 21))
    policy.q_net.save(tmp_path / "network")
    network, obs = RainbowNetwork.load(tmp_path / "network"), observations()
    with network.temporary_noise(0), policy.q_net.temporary_noise(0):
        assert th.equal(network(obs), policy.q_net(obs))


def test_sizes_on_atari_are_those_of_the_paper():
    net = policy_of(CnnPolicy, IMAGE).q_net
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if p.dim() > 1}
    assert shapes == {
        "features_extractor.cnn.0.weight": (32, 4, 8, 8),
        "features_extractor.cnn.2.weight": (32, 32, 4, 4),
        "features_extractor.cnn.4.weight": (64, 32, 3, 3),
        **{
            f"{stream}.{layer}.{kind}": shape
            for stream, outputs in (("advantage", 5 * 51), ("value", 51))
            for layer, shape in ((0, (512, 3136)), (2, (outputs, 512)))
            for kind in ("weight", "weight_sigma")
        },
    }
    convolutions = [m for m in net.modules() if isinstance(m, th.nn.Conv2d)]
    assert [c.stride[0] for c in convolutions] == [4, 2, 1]
    assert net.parts.sigma0 == 0.5


def test_state_holds_parameters_only():
    """Neither noise nor generator: a target network that loads it keeps its own."""
    policy = policy_of()
    assert set(policy.q_net.state_dict()) == {name for name, _ in policy.q_net.named_parameters()}


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="n_atoms must be at least 2"):
        policy_of(n_atoms=1)
    with pytest.raises(ValueError, match="v_min"):
        policy_of(v_min=1.0, v_max=1.0)
    with pytest.raises(AssertionError, match="MlpPolicy"):
        policy_of(CnnPolicy, VECTOR)
    with pytest.raises(TypeError, match="duelling"):
        policy_of(duelling=False)
    assert RainbowCNN(IMAGE, channels=(32, 64, 64)).features_dim == 3136
