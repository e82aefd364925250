"""The parts in a loop of your own: one file in the manner of CleanRL's dqn.py, without SB3.

    python examples/cleanrl_style.py

Three lines make DQN count-based soft Q-learning; they are marked with (1), (2) and (3).
"""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql.counts import SimHash
from cbsql.operators import mellowmax
from cbsql.temperature import CountBased, Temperature


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    seed: int = 1
    total_timesteps: int = 10_000
    learning_rate: float = 1e-3
    buffer_size: int = 10_000
    gamma: float = 0.99
    target_network_frequency: int = 250
    """agent steps"""
    batch_size: int = 64
    exploration_steps: int = 3_000
    """agent steps in which epsilon falls from 1 to 0.05"""
    learning_starts: int = 500
    """agent steps"""
    train_frequency: int = 4
    """agent steps for each update"""


def network(inputs: int, actions: int) -> nn.Module:
    layers = (nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(84, actions))


def train(args: Args, temperature: Temperature) -> list[float]:
    """The returns of all episodes."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    env = gym.make(args.env_id)
    (inputs,), actions = env.observation_space.shape, env.action_space.n
    q_network, target_network = network(inputs, actions), network(inputs, actions)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    size = args.buffer_size
    obs_buffer, next_buffer = np.zeros((2, size, inputs), np.float32)
    actions_buffer, rewards_buffer, dones_buffer = np.zeros((3, size), np.float32)

    returns, episode_return = [], 0.0
    obs, _ = env.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        epsilon = max(0.05, 1 - 0.95 * step / args.exploration_steps)
        if rng.random() < epsilon:
            action = int(rng.integers(actions))
        else:
            with torch.no_grad():
                action = int(q_network(torch.as_tensor(obs)).argmax())
        next_obs, reward, terminated, truncated, _ = env.step(action)
        episode_return += float(reward)
        at = step % size
        obs_buffer[at], next_buffer[at] = obs, next_obs
        actions_buffer[at], rewards_buffer[at], dones_buffer[at] = action, reward, terminated
        obs = next_obs
        if terminated or truncated:
            returns.append(episode_return)
            episode_return = 0.0
            obs, _ = env.reset()

        if step >= args.learning_starts and step % args.train_frequency == 0:
            batch = rng.integers(min(step + 1, size), size=args.batch_size)
            with torch.no_grad():
                next_q = target_network(torch.as_tensor(next_buffer[batch]))  # (batch, actions)
                # (1) How much the values of the next states are trusted.
                beta = torch.as_tensor(temperature.beta(next_buffer[batch]))
                # (2) In the place of next_q.max(dim=1).
                next_v = mellowmax(next_q, beta)
                alive = torch.as_tensor(1 - dones_buffer[batch])
                target = torch.as_tensor(rewards_buffer[batch]) + args.gamma * alive * next_v
            q = q_network(torch.as_tensor(obs_buffer[batch]))
            old = q[torch.arange(args.batch_size), torch.as_tensor(actions_buffer[batch]).long()]
            loss = F.mse_loss(old, target.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # (3) These states have received one value update more.
            temperature.update(obs_buffer[batch])
        if step % args.target_network_frequency == 0:
            target_network.load_state_dict(q_network.state_dict())
    env.close()
    return returns


if __name__ == "__main__":
    torch.set_num_threads(1)
    returns = train(Args(), CountBased(SimHash(4), kappa=0.01))
    print(f"first 20 episodes: {np.mean(returns[:20]):.0f}, last 20: {np.mean(returns[-20:]):.0f}")
