"""Noisy layers: ours, beside noise always on activations and always on a matrix of weights.

    python benchmarks/noisy.py

The two layers of Rainbow's advantage stream on Atari with all 18 actions, with fresh noise in each
pass. Everything is measured in turns in one run, so that a busy machine slows all of it.
"""

import statistics
import time

import torch as th
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql.deep.networks import NoisyLinear
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import keep_memory

LAYERS = [(3136, 512), (512, 18 * 51)]
ROUNDS = 100


class OnActivations(NoisyLinear):
    """Two products with as many rows as are given."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        noise_in, noise_out = self.noise.split([self.in_features, self.out_features], 1)
        sigma = F.linear(x * noise_in, self.weight_sigma, self.bias_sigma)
        return F.linear(x, self.weight, self.bias) + noise_out * sigma


class OnWeights(NoisyLinear):
    """As it is usually written, with as few passes over the matrix as autograd makes do with."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        noise_in, noise_out = self.noise[0].split([self.in_features, self.out_features])
        scaled = self.weight_sigma * noise_in
        weight = th.addcmul(self.weight, scaled, noise_out.unsqueeze(1))
        return F.linear(x, weight, self.bias + self.bias_sigma * noise_out)


@th.no_grad()
def act(layer: NoisyLinear) -> None:
    layer.reset_noise()
    layer(th.ones(1, layer.in_features))


@th.no_grad()
def judge(layer: NoisyLinear) -> None:
    """The next states of a batch."""
    layer.reset_noise()
    layer(th.ones(32, layer.in_features))


def learn(layer: NoisyLinear) -> None:
    layer.reset_noise()
    layer.zero_grad()
    layer(th.ones(32, layer.in_features, requires_grad=True)).sum().backward()


PASSES = {
    "act: forward, batch 1": act,
    "judge: forward, batch 32": judge,
    "learn: forward and backward, batch 32": learn,
}
UPDATE = (4, 2, 1)  # times each, between two gradient steps of Rainbow with double Q-learning


def milliseconds(layer: NoisyLinear) -> list[float]:
    times = []
    for work in PASSES.values():
        start = time.perf_counter()
        work(layer)
        times.append(1e3 * (time.perf_counter() - start))
    return [*times, sum(n * t for n, t in zip(UPDATE, times, strict=True))]


def main() -> None:
    th.set_num_threads(1)  # as in sweeps
    keep_memory()
    print("## Noisy layers, milliseconds (medians)\n")
    print("| layer | pass | ours | on activations | on weights |")
    print("|---|---|---|---|---|")
    for inputs, outputs in LAYERS:
        layers = [kind(inputs, outputs) for kind in (NoisyLinear, OnActivations, OnWeights)]
        rounds = [[milliseconds(layer) for layer in layers] for _ in range(ROUNDS)]
        for i, name in enumerate([*PASSES, "one update: act 4 times, judge twice, learn"]):
            medians = (statistics.median(r[k][i] for r in rounds) for k in range(len(layers)))
            cells = " | ".join(f"{median:.2f}" for median in medians)
            print(f"| {inputs} to {outputs} | {name} | {cells} |")
    print(f"\n{provenance()['machine']}\n")


if __name__ == "__main__":
    main()
