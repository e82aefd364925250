"""Whether algorithms differ, and whether the paper is right about it, by runs of several seeds."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cbsql.experiments.curves import Floats, Result
from cbsql.experiments.paper import Table
from cbsql.experiments.statistics import (
    LEAST_RUNS,
    holm,
    permutation_p,
    probability_of_improvement,
)

LEVEL = 0.05
"""Where equals are compared, this often at most one is called different."""


def _test(run: Result) -> float:
    scores = run.scores("game")
    return float(scores.mean()) if len(scores) else math.nan


MEASURES: Mapping[str, Callable[[Result], float]] = MappingProxyType(
    {"test": _test, "training": lambda run: run.training}
)

Scores = dict[tuple[str, str], dict[int, float]]
"""Of runs, by game and algorithm, and then by seed; empty where there are none."""


def scores_by_seed(runs: Iterable[Result], measure: str) -> Scores:
    """The runs that have a score."""
    scores: Scores = defaultdict(dict)
    for run in runs:
        if math.isfinite(score := MEASURES[measure](run)):
            scores[run.game, run.algorithm][run.seed] = score
    return scores


def score_table(scores: Scores, algorithm: str, games: Sequence[str]) -> Floats:
    """Scores (seeds, games) of the seeds that have one in every game."""
    seeds = sorted(set.intersection(*(set(scores[game, algorithm]) for game in games)))
    rows = [[scores[game, algorithm][seed] for game in games] for seed in seeds]
    return np.array(rows).reshape(-1, len(games))


@dataclass(frozen=True)
class Comparison:
    """One algorithm beside another, on the same games."""

    ours: str
    other: str
    x: Floats
    """(seeds, games) of ours, of the other below; they may differ in seeds."""
    y: Floats

    @property
    def games(self) -> int:
        """In how many games they are compared."""
        return int(self.x.shape[1])

    @property
    def probability(self) -> float:
        """How likely a run of ours scores higher."""
        return float(probability_of_improvement(self.x, self.y))

    @property
    def p(self) -> float:
        """How often equals would differ as much, were nothing else compared."""
        return permutation_p(self.x, self.y)

    @property
    def least_p(self) -> float:
        """That of the clearest order there is: of all ways to exchange runs, two have it."""
        runs, others = len(self.x), len(self.y)
        return float(2 / math.comb(runs + others, runs) ** self.games)


def compare(scores: Scores, ours: str, other: str, games: Sequence[str]) -> Comparison | None:
    """By the games, if there are any, for which both have seeds enough."""
    both = [g for g in games if min(len(scores[g, ours]), len(scores[g, other])) >= LEAST_RUNS]
    if both:
        x, y = (score_table(scores, algorithm, both) for algorithm in (ours, other))
        if min(len(x), len(y)) >= LEAST_RUNS:
            return Comparison(ours, other, x, y)
    return None


def verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    """What is to be said of comparisons that are made together."""
    said = []
    adjusted = holm(np.array([one.p for one in comparisons]))
    for one, p in zip(comparisons, adjusted, strict=True):
        if p < LEVEL:
            said.append(f"scores {'higher' if one.probability > 0.5 else 'lower'} than")
        else:
            few = len(comparisons) * one.least_p >= LEVEL
            said.append("has too few runs to be told from" if few else "cannot be told from")
    return said


@dataclass(frozen=True)
class Claim:
    """That the count-based algorithm scores highest in those games in which the paper's does."""

    table: Table
    compared: dict[str, dict[str, tuple[Comparison, str]]]
    """By measure, with what other algorithms have runs enough, each with the verdict."""

    @property
    def verdict(self) -> str:
        """It holds or does not if all measures say so, and is undecided otherwise."""
        rivals = self.table.algorithms[:-1]
        if any(self._is("scores lower than", other) for other in rivals):
            return "does not hold"
        made = [one for by_other in self.compared.values() for one, _ in by_other.values()]
        everywhere = all(one.games == len(self.table.claimed) for one in made)
        holds = everywhere and all(self._is("scores higher than", other) for other in rivals)
        return "holds" if holds else "undecided"

    def _is(self, verdict: str, other: str) -> bool:
        return all(
            other in by_other and by_other[other][1] == verdict
            for by_other in self.compared.values()
        )


def examine(paper: Table, runs: Sequence[Result]) -> Claim:
    """What the runs of a table say of its claim."""
    compared = {}
    *rivals, ours = paper.algorithms
    for measure in MEASURES:
        scores = scores_by_seed(runs, measure)
        made = [one for other in rivals if (one := compare(scores, ours, other, paper.claimed))]
        compared[measure] = {
            one.other: (one, verdict) for one, verdict in zip(made, verdicts(made), strict=True)
        }
    return Claim(paper, compared)
