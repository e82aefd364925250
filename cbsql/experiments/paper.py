"""The paper's tables."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """One of the paper's tables of scores."""

    name: str
    frames: int
    """Emulator frames of training."""
    test_games: int
    """The last so many test episodes are averaged."""
    runs: int
    """Seeds in the paper."""
    published: Mapping[tuple[str, str], tuple[float, float]]
    """Mean and standard deviation, by game and algorithm."""


def _table(names: tuple[str, ...], rows: dict[str, tuple[tuple[float, float], ...]]):  # type: ignore[no-untyped-def]
    return {(g, a): cell for g, row in rows.items() for a, cell in zip(names, row, strict=True)}


TABLE_1 = Table(
    "Table 1",
    3_000_000,
    100,
    3,
    _table(
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
    "Table 2",
    500_000,
    50,
    5,
    _table(
        ("rainbow", "rainbow-sql 100", "rainbow-sql 1000", "rainbow-cbsql"),
        {
            "breakout": ((10.2, 4.9), (5.5, 3.6), (3.6, 2.1), (39.9, 15.4)),
            "qbert": ((356.0, 202.8), (30.0, 60.0), (1.0, 4.9), (370.0, 43.0)),
        },
    ),
)
