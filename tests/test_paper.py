"""The paper's tables as runs."""

import pytest

from cbsql.experiments.curves import name_of
from cbsql.experiments.paper import TABLE_1, TABLE_2, TABLES
from cbsql.experiments.spec import preset


@pytest.mark.parametrize(
    ("table", "runs", "steps"), [(TABLE_1, 6 * 4 * 3, 750_000), (TABLE_2, 2 * 4 * 5, 125_000)]
)
def test_runs_are_those_of_the_paper(table, runs, steps):
    specs = table.specs()
    assert len(specs) == len({spec.name for spec in specs}) == runs
    assert {spec.steps for spec in specs} == {steps}
    assert {preset(spec).steps for spec in specs} == {steps}
    # What the tables are compared with finds its runs by these names.
    names = {(spec.game, name_of(spec.describe())) for spec in specs}
    assert names == set(table.published)


def test_single_columns_can_be_run():
    specs = TABLE_2.specs(["qbert"], [0, 1], algorithms=["rainbow-sql 1000", "rainbow"])
    assert [(spec.algorithm, spec.beta, spec.seed) for spec in specs] == [
        ("rainbow-sql", 1000, 0),
        ("rainbow", 100, 0),
        ("rainbow-sql", 1000, 1),
        ("rainbow", 100, 1),
    ]


def test_names_are_readable():
    assert TABLE_2.specs()[1].name == "breakout-rainbow-sql-100-0"
    assert TABLE_1.specs(["pong"], [7], 400_000)[-1].name == "pong-cbsql-steps=100000-7"


def test_the_best_scores_are_those_in_bold():
    best = {
        (name, game): max(
            (algorithm for g, algorithm in table.published if g == game),
            key=lambda algorithm: table.published[game, algorithm][0],
        )
        for name, table in TABLES.items()
        for game, _ in table.published
    }
    assert {key for key, algorithm in best.items() if not algorithm.endswith("cbsql")} == {
        ("table1", "pong"),
        ("table1", "space_invaders"),
    }
    assert best["table1", "pong"] == best["table1", "space_invaders"] == "sql 100"


def test_sums_of_the_printed_columns():
    """Added up from the paper by hand."""

    def column(table, name):
        rows = [scores for (_, algorithm), scores in table.published.items() if algorithm == name]
        return pytest.approx([sum(row[i] for row in rows) for i in (0, 1)])

    assert column(TABLE_1, "dqn") == [743.43, 1249.2]
    assert column(TABLE_1, "sql 100") == [1029.23, 1615.6]
    assert column(TABLE_1, "sql 1000") == [757.92, 1252.0]
    assert column(TABLE_1, "cbsql") == [1150.38, 1440.6]
    assert column(TABLE_2, "rainbow") == [366.2, 207.7]
    assert column(TABLE_2, "rainbow-sql 100") == [35.5, 63.6]
    assert column(TABLE_2, "rainbow-sql 1000") == [4.6, 7.0]
    assert column(TABLE_2, "rainbow-cbsql") == [409.9, 58.4]


def test_the_claims_are_those_of_the_text():
    """Best "in 4 of the 6 games", and with Rainbow in both."""
    assert (len(TABLE_1.games), len(TABLE_1.claimed)) == (6, 4)
    assert TABLE_2.claimed == TABLE_2.games == ["breakout", "qbert"]
