"""The paper's tables: what was run, and the scores it printed.

Its learning curves are those of the same runs; its chain-walk is :mod:`cbsql.experiments.chain`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cbsql.envs.atari import FRAME_SKIP, rom_name
from cbsql.experiments.spec import RunSpec


@dataclass(frozen=True)
class Table:
    """A table of the paper."""

    name: str
    title: str
    frames: int
    """Emulator frames of training."""
    test_games: int
    runs: int
    """Seeds per game and algorithm."""
    published: Mapping[tuple[str, str], tuple[float, float]]
    """Mean and standard deviation of the test scores, by game and algorithm."""

    @property
    def games(self) -> list[str]:
        """Its rows."""
        return list(dict.fromkeys(game for game, _ in self.published))

    @property
    def algorithms(self) -> list[str]:
        """Its columns, of which the last is the count-based one."""
        return list(dict.fromkeys(algorithm for _, algorithm in self.published))

    @property
    def claimed(self) -> list[str]:
        """The games in which the paper's highest score is that of the count-based algorithm."""
        *rivals, ours = self.algorithms
        best = {
            game: max(self.published[game, other][0] for other in rivals) for game in self.games
        }
        return [game for game in self.games if self.published[game, ours][0] > best[game]]

    def specs(
        self,
        games: Iterable[str] | None = None,
        seeds: Iterable[int] | None = None,
        frames: int | None = None,
        algorithms: Iterable[str] | None = None,
    ) -> list[RunSpec]:
        """The runs of the table, or of other games, seeds and training times in its manner.

        The first seed of everything comes first, so that a sweep soon has something to compare.

        :param algorithms: only these of the table's, such as "rainbow-sql 100"
        """
        columns = self.algorithms
        chosen = list(columns if algorithms is None else algorithms)
        if foreign := [name for name in chosen if name not in columns]:
            raise ValueError(
                f"{self.name} has the algorithms {', '.join(columns)}; there is no {foreign[0]!r}."
            )
        rows = list(self.games if games is None else map(rom_name, games))
        steps = (self.frames if frames is None else frames) // FRAME_SKIP
        if not steps:
            raise ValueError(f"{frames} frames are less than a step, of {FRAME_SKIP}.")
        specs = []
        for seed in range(self.runs) if seeds is None else seeds:
            for game in rows:
                for name in chosen:
                    algorithm, *constant = name.split()
                    beta = float(constant[0]) if constant else 100.0
                    specs.append(RunSpec(game, algorithm, steps, seed, beta))
        return specs


def _table(
    algorithms: tuple[str, ...], rows: Mapping[str, tuple[tuple[float, float], ...]]
) -> dict[tuple[str, str], tuple[float, float]]:
    return {
        (game, algorithm): scores
        for game, row in rows.items()
        for algorithm, scores in zip(algorithms, row, strict=True)
    }


TABLE_1 = Table(
    name="table1",
    title="Table 1",
    frames=3_000_000,
    test_games=100,
    runs=3,
    published=_table(
        ("dqn", "sql 100", "sql 1000", "cbsql"),
        {
            "breakout": ((5.9, 5.9), (5.9, 4.5), (5.1, 4.7), (8.2, 6.1)),
            "freeway": ((21.0, 1.5), (14.6, 8.5), (22.56, 4.7), (25.82, 4.9)),
            "pong": ((1.93, 2.6), (17.83, 2.2), (16.31, 2.7), (17.56, 2.0)),
            "qbert": ((568.4, 1101.9), (828, 1411.7), (564.5, 1097.5), (875.3, 1254.6)),
            "seaquest": ((13.5, 24.1), (4, 60.2), (17.2, 24.0), (84.6, 60.2)),
            "space_invaders": ((132.7, 113.2), (158.9, 128.5), (132.25, 118.4), (138.9, 112.8)),
        },
    ),
)

TABLE_2 = Table(
    name="table2",
    title="Table 2",
    frames=500_000,
    test_games=50,
    runs=5,
    published=_table(
        ("rainbow", "rainbow-sql 100", "rainbow-sql 1000", "rainbow-cbsql"),
        {
            "breakout": ((10.2, 4.9), (5.5, 3.6), (3.6, 2.1), (39.9, 15.4)),
            "qbert": ((356.0, 202.8), (30.0, 60.0), (1.0, 4.9), (370.0, 43.0)),
        },
    ),
)

TABLES = {table.name: table for table in (TABLE_1, TABLE_2)}
