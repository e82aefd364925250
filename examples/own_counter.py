"""A counter of your own, as the temperature of soft Q-learning: states rounded to a grid.

    python examples/own_counter.py

Anything with these four methods is a counter; there is no class to inherit from.
"""

import gymnasium
import numpy as np
import torch

from cbsql.temperature import CountBased


class GridCounter:
    def __init__(self, cell: float) -> None:
        self.cell = cell
        self.table: dict[tuple[int, ...], int] = {}

    def cells(self, x) -> list[tuple[int, ...]]:
        rows = torch.as_tensor(x).cpu() / self.cell  # learners pass tensors, maybe of a GPU
        return [tuple(row) for row in rows.floor().int().tolist()]

    def count(self, x) -> np.ndarray:
        return np.array([self.table.get(cell, 0) for cell in self.cells(x)], dtype=np.float64)

    def update(self, x) -> None:
        for cell in self.cells(x):
            self.table[cell] = self.table.get(cell, 0) + 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        cells, counts = list(self.table), list(self.table.values())
        return {"cells": torch.tensor(cells), "counts": torch.tensor(counts)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        cells = map(tuple, state["cells"].tolist())
        self.table = dict(zip(cells, state["counts"].tolist(), strict=True))


def main() -> None:
    temperature = CountBased(GridCounter(cell=0.25), kappa=0.01)
    env = gymnasium.make("CartPole-v1")
    env.action_space.seed(0)
    start, _ = env.reset(seed=0)
    state = start
    for _ in range(2000):  # in place of a learner, which updates the states of its batches
        temperature.update(state[None])
        state, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            state, _ = env.reset()
    beta_start, beta_falling = temperature.beta(np.stack([start, [0.0, 2.0, 0.2, -2.5]]))
    print(f"beta = {beta_start:.2f} at the start, {beta_falling:.2f} where the pole falls")


if __name__ == "__main__":
    main()
