"""The paper's tabular experiment: noisy chain-walk, many runs, a curve for each algorithm."""

import csv
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cbsql.envs.chain_walk import ACTIONS, EPISODE_STEPS, STATES, End, Retreat, chain_model
from cbsql.experiments.provenance import provenance
from cbsql.operators import mellowmax
from cbsql.tabular.chain_walk import Algorithm, Chance, Outcome, Schedule, simulate
from cbsql.tabular.planning import soft_value_iteration

WINDOWS = ((1, 20), (81, 120), (281, 300))
"""Episodes, first and last, over which the summary averages."""

RUNS_PER_BATCH = 500
"""Runs that share a random generator; changing it changes the numbers drawn."""


@dataclass(frozen=True)
class ChainSpec:
    """One reproduction of the figure."""

    runs: int = 10_000
    """Independent learners averaged for each algorithm."""
    episodes: int = 300
    """Training episodes of each learner."""
    retreat: str = "back"
    """Where action 0 leads: back, stay or start."""
    end: str = "timelimit"
    """What the fifth step is: a timelimit (bootstrap) or terminal."""
    kappa: float = 0.01
    """Growth of beta per count, or per step in the linear schedule."""
    gamma: float = 0.99
    """Discount factor."""
    epsilon: float = 0.01
    """Probability of a random action."""
    learning_rate: float = 1.0
    """How far a value moves to its target."""
    seed: int = 0
    """Of the generator that draws all noise and exploration."""
    all_schedules: bool = False
    """Beside the paper's five algorithms, those its argument refers to."""

    def __post_init__(self) -> None:
        for name in ("runs", "episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name, kind in (("retreat", Retreat), ("end", End)):
            if getattr(self, name) not in kind.__members__:
                choices = ", ".join(kind.__members__)
                raise ValueError(f"{name} must be one of {choices}, not {getattr(self, name)!r}.")
        if not 0 < self.kappa < math.inf:
            raise ValueError(f"kappa must be a positive number, not {self.kappa!r}.")
        if not 0 <= self.gamma < 1:
            raise ValueError(f"gamma must be in [0, 1), not {self.gamma!r}.")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must be a probability, not {self.epsilon!r}.")
        if not 0 < self.learning_rate <= 1:
            raise ValueError(f"learning_rate must be in (0, 1], not {self.learning_rate!r}.")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, and is {self.seed}.")

    @property
    def algorithms(self) -> list[Algorithm]:
        """The curves of the figure, in the paper's order."""
        paper = [
            Algorithm("Q-learning", Schedule.constant, math.inf),
            *(Algorithm(f"SQL {beta}", Schedule.constant, beta) for beta in (10, 100, 1000)),
            Algorithm("CBSQL", Schedule.count, self.kappa),
        ]
        others = [
            Algorithm("linear", Schedule.linear, self.kappa),
            Algorithm("gap", Schedule.gap),
            Algorithm("Psi-learning", Schedule.trust_region, self.kappa),
        ]
        return paper + others if self.all_schedules else paper


@dataclass
class ChainResult:
    """Noise-free training returns (runs, episodes) by algorithm."""

    spec: ChainSpec
    returns: dict[str, NDArray[np.float64]]
    seconds: float
    effective_beta: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the trust-region comparison, made with all schedules and a time limit."""


def run_chain(
    spec: ChainSpec, threads: int | None = None, advance: Callable[[int], None] = lambda _: None
) -> ChainResult:
    """Simulate every algorithm of ``spec``; the result does not depend on ``threads``.

    ``advance`` is told the number of runs finished, each of them with all algorithms.
    """
    start = time.perf_counter()
    # In the order of memory that a batch has: copying is then cheap.
    shape = (spec.runs, spec.episodes)
    returns = {a.name: np.empty(shape, order="F") for a in spec.algorithms}

    def batch(index: int) -> None:
        first = index * RUNS_PER_BATCH
        runs = min(RUNS_PER_BATCH, spec.runs - first)
        chance = _draw(spec, index, runs)
        for algorithm in spec.algorithms:
            outcome = _simulate(spec, algorithm, chance)
            returns[algorithm.name][first : first + runs] = outcome.returns
        advance(runs)

    # The kernels release the GIL, and each batch has a generator of its own.
    pool = ThreadPoolExecutor(threads or os.cpu_count())
    try:
        list(pool.map(batch, range(math.ceil(spec.runs / RUNS_PER_BATCH))))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for the batches under way only
    # With a true end the value of a state depends on the steps left, which the table cannot know.
    comparable = spec.all_schedules and End[spec.end] is End.timelimit
    effective = _measure_effective_beta(spec) if comparable else []
    return ChainResult(spec, returns, time.perf_counter() - start, effective)


def optimal_return(retreat: Retreat) -> float:
    """The best expected return of an episode, by value iteration over its five steps."""
    q = soft_value_iteration(*chain_model(retreat), gamma=1, horizon_steps=EPISODE_STEPS)
    return float(q[0].max())


def _draw(spec: ChainSpec, batch: int, runs: int, epsilon: float | None = None) -> Chance:
    rng = np.random.Generator(np.random.SFC64([spec.seed, batch]))  # NumPy's fastest
    return Chance.draw(rng, runs, spec.episodes, spec.epsilon if epsilon is None else epsilon)


def _simulate(spec: ChainSpec, algorithm: Algorithm, chance: Chance) -> Outcome:
    return simulate(
        algorithm,
        chance,
        retreat=Retreat[spec.retreat],
        end=End[spec.end],
        gamma=spec.gamma,
        learning_rate=spec.learning_rate,
    )


def _measure_effective_beta(spec: ChainSpec) -> list[dict[str, Any]]:
    """The beta(s) at which softmax(beta Q) is Psi-learning's policy, Q being its current values.

    Psi-learning multiplies its policy by exp(kappa Q) at each update of a state. Were Q constant
    and all actions updated each time, beta(s) would be kappa n(s): why the paper counts.
    Measured for the learner's own behaviour, and for a uniform one that updates both actions of a
    state equally often, as the ratio of the means over runs of the log-odds and of the gap in Q.
    """
    transitions, rewards = (torch.from_numpy(part) for part in chain_model(Retreat[spec.retreat]))
    learner = Algorithm("Psi-learning", Schedule.trust_region, spec.kappa)
    rows = []
    for behaviour, epsilon in (("epsilon-greedy", spec.epsilon), ("uniform", 1.0)):
        chance = _draw(spec, 0, min(spec.runs, 1000), epsilon)
        for episodes in np.unique(np.linspace(spec.episodes / 20, spec.episodes, 20).astype(int)):
            if episodes < 1:
                continue
            # The luck of the first episodes is the same, so this continues the shorter runs.
            early = Chance(*(luck[:, :episodes] for luck in vars(chance).values()))
            outcome = _simulate(spec, learner, early)
            table = torch.from_numpy(outcome.q)  # (runs, states, actions)
            values = mellowmax(table, spec.kappa)  # (runs, states)
            backed_up = rewards + spec.gamma * torch.einsum("sat,rt->rsa", transitions, values)
            log_odds, gap = (
                (q[..., 1] - q[..., 0]).mean(0) for q in (spec.kappa * table, backed_up)
            )  # (states,)
            counts = outcome.n.mean(0)
            rows += [
                {
                    "behaviour": behaviour,
                    "episode": int(episodes),
                    "state": state,
                    "kappa_n": spec.kappa * float(counts[state]),
                    "effective_beta": float(log_odds[state] / gap[state]),
                }
                for state in range(STATES)
            ]
    return rows


def write_chain(result: ChainResult, folder: Path, command: str) -> None:
    """Write curves.csv, figure.png and .svg, summary.md and run.json.

    With all schedules, the figure is still the paper's, and schedules.png and .svg have all curves.
    """
    rows = [
        {"algorithm": name, "episode": episode + 1, "mean": m, "ci_low": m - h, "ci_high": m + h}
        for name, returns in result.returns.items()
        for episode, (m, h) in enumerate(zip(*_mean_and_half_width(returns), strict=True))
    ]
    _write_csv(folder / "curves.csv", rows)
    paper = list(result.returns)[:5]
    _save_figure(folder / "figure", lambda axes: _plot_curves(axes, result, paper))
    if result.spec.all_schedules:
        everything = list(result.returns)
        _save_figure(folder / "schedules", lambda axes: _plot_curves(axes, result, everything))
    if result.effective_beta:
        _write_csv(folder / "effective_beta.csv", result.effective_beta)
        _save_figure(folder / "effective_beta", lambda axes: _plot_effective_beta(axes, result))
    (folder / "summary.md").write_text(summary(result))
    record = {
        "command": command,
        "arguments": asdict(result.spec),
        "seconds": round(result.seconds, 2),
        **provenance(),
    }
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")


def summary(result: ChainResult) -> str:
    """A Markdown table of the mean return in the windows, with 95% intervals over runs."""
    spec = result.spec
    windows = [(first, last) for first, last in WINDOWS if last <= spec.episodes]
    lines = [
        f"# Chain-walk: retreat {spec.retreat}, end {spec.end}",
        "",
        f"Mean noise-free training return over {spec.runs:,} runs, with the half-width of its 95% "
        f"interval. The optimum is {optimal_return(Retreat[spec.retreat]):.1f}.",
        "",
        "| algorithm | " + " | ".join(f"episodes {a}-{b}" for a, b in windows) + " |",
        "|---" * (1 + len(windows)) + "|",
    ]
    for name, returns in result.returns.items():
        cells = []
        for first, last in windows:
            mean, half = _mean_and_half_width(returns[:, first - 1 : last].mean(1))
            cells.append(f"{mean:.3f} ± {half:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean_and_half_width(values: NDArray[np.float64]) -> tuple[Any, Any]:
    """Mean over runs (the first dimension), and 1.96 standard errors."""
    runs = len(values)
    deviation = values.std(0, ddof=1) if runs > 1 else np.full(values.shape[1:], np.nan)
    return values.mean(0), 1.96 * deviation / math.sqrt(runs)


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


COLOURS = {
    "Q-learning": "#555555",
    "SQL 10": "#9ecae1",
    "SQL 100": "#4292c6",
    "SQL 1000": "#084594",
    "CBSQL": "#d7301f",
    "linear": "#fd8d3c",
    "gap": "#41ab5d",
    "Psi-learning": "#807dba",
}


def _plot_curves(axes: Axes, result: ChainResult, names: list[str]) -> None:
    best = optimal_return(Retreat[result.spec.retreat])
    episodes = np.arange(1, result.spec.episodes + 1)
    axes.axhline(best, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(episodes[-1], best + 0.012, f"optimum {best:.1f}", ha="right", fontsize=8)
    for name in names:
        mean, half = _mean_and_half_width(result.returns[name])
        extra = name in ("linear", "gap", "Psi-learning")
        style: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (5, 1))} if extra else {}
        if name == "CBSQL":
            style = {"linewidth": 2.2, "zorder": 5}
        axes.plot(episodes, mean, color=COLOURS[name], label=name, **style)
        axes.fill_between(episodes, mean - half, mean + half, color=COLOURS[name], alpha=0.2, lw=0)
    axes.set(
        xlabel="training episode",
        ylabel="return without noise",
        title=f"Noisy chain-walk, {result.spec.runs:,} runs "
        f"(retreat {result.spec.retreat}, end {result.spec.end})",
        xlim=(0, result.spec.episodes),
    )
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _plot_effective_beta(axes: Axes, result: ChainResult) -> None:
    rows = result.effective_beta
    longest = max(row["kappa_n"] for row in rows)
    for slope, name in ((1, "kappa n(s)"), (1 / ACTIONS, "kappa n(s) / |A|")):
        end = (longest, slope * longest)
        axes.plot((0, end[0]), (0, end[1]), color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(name, end, ha="right", va="bottom", fontsize=8)
    for behaviour, colour in (("epsilon-greedy", "#807dba"), ("uniform", "#41ab5d")):
        for state in sorted({row["state"] for row in rows}):
            points = [r for r in rows if r["behaviour"] == behaviour and r["state"] == state]
            x, y = ([row[key] for row in points] for key in ("kappa_n", "effective_beta"))
            axes.plot(x, y, color=colour, label=f"{behaviour} behaviour" if state == 0 else None)
            axes.annotate(f"s={state}", (x[-1], y[-1]), fontsize=7, color=colour)
    axes.set(
        xlabel="kappa n(s)",
        ylabel="effective beta(s)",
        title="Inverse temperature of Psi-learning's policy in each state",
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _save_figure(stem: Path, draw: Callable[[Axes], None]) -> None:
    # A figure without pyplot: no global state, no display needed.
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    figure.savefig(stem.with_suffix(".png"), dpi=160)
    with matplotlib.rc_context({"svg.hashsalt": "cbsql"}):  # the same file from the same figure
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
