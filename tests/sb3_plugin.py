"""A pytest plugin that puts the class named by AS_DQN in the place of Stable-Baselines3's DQN.

It lets SB3's own tests judge our classes; docs/algorithms.md has the command.
"""

import os

import stable_baselines3
import stable_baselines3.dqn

import cbsql

stable_baselines3.DQN = stable_baselines3.dqn.DQN = getattr(cbsql, os.environ["AS_DQN"])
