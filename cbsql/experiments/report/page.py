"""From results to one HTML page that needs nothing but a browser."""

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from cbsql.envs.atari import FRAME_SKIP
from cbsql.envs.chain_walk import Retreat
from cbsql.experiments import chain, curves
from cbsql.experiments.comparison import (
    Comparison,
    Scores,
    compare,
    examine,
    score_table,
    scores_by_seed,
    verdicts,
)
from cbsql.experiments.curves import Floats, Result
from cbsql.experiments.paper import TABLE_1, TABLE_2, Table
from cbsql.experiments.report.collect import Chain, Collection
from cbsql.experiments.statistics import (
    HUMAN,
    LEAST_RUNS,
    bootstrap_interval,
    human_normalised,
    interquartile_mean,
    mean_interval,
    performance_profile,
    probability_of_improvement,
)

EPISODES_PER_POINT = 3
"""Of the chain-walk's curves, to keep the page small."""

_DASHES = {"sql 10": "4 2", "sql 100": "8 3", "sql 1000": "2 3", "munchausen": "8 3 2 3"}
_SPARE_DASHES = ("", "6 3", "2 2", "9 3 2 3", *(f"{n} {n}" for n in range(4, 12)))


def render(template: str, **content: Any) -> str:
    """A page from one of the templates beside this file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(number=number, title=title, share="{:.2f}".format)
    return environment.get_template(template).render(**content)


def number(value: float, signed: bool = False) -> str:
    """Three digits, with a true minus sign."""
    if not math.isfinite(value):
        return "\N{EN DASH}" if math.isnan(value) else "∞"
    digits = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")
    text = "0" if value == 0 else digits.replace("-", "\N{MINUS SIGN}")
    return "+" + text if signed and value > 0 else text


def title(algorithm: str) -> str:
    """An algorithm's name as it is written in prose."""
    name, _, rest = algorithm.partition(" ")
    words = [word if word == "munchausen" else word.upper() for word in name.split("-")]
    words = [{"RAINBOW": "Rainbow", "munchausen": "Munchausen"}.get(w, w) for w in words]
    constant = f" {rest}" if not rest[:1].isdigit() else f" β={rest}"
    return "-".join(words) + (constant if rest else "")


def make_page(found: Collection, out: Path) -> str:
    """The report on a collection, to be opened from the folder ``out``."""
    results = list(map(_in_group, found.results))
    groups = [_group(name, list(rows)) for name, rows in _by_group(results)]
    readings = [_chain(one) for one in sorted(found.chains, key=_usual_first)]
    figures = {
        "chains": readings,
        "groups": [{"legend": group["legend"], "charts": group["charts"]} for group in groups],
        "profiles": [group["profile"] for group in groups],
    }
    return render(
        "page.html",
        figures=_finite(figures),
        groups=groups,
        readings=readings,
        early=_early(readings),
        tables=_paper_tables(results),
        runs=[_row(result, out) for result in sorted(found.results, key=_order)],
        chains=[_chain_row(one, out) for one in found.chains],
        unread=found.unread,
        counts=_counts(found),
        least_runs=LEAST_RUNS,
    )


def make_tables(found: Collection) -> str:
    """The paper's tables beside ours, in Markdown."""
    return render("tables.md", tables=_paper_tables(found.results), least_runs=LEAST_RUNS)


def _counts(found: Collection) -> dict[str, Any]:
    results = found.results
    made = [*results, *found.chains]
    commits = {one.commit for one in results} | {one.record["commit"] for one in found.chains}
    versions = {version for one in results for version in one.versions}
    return {
        "runs": len(results),
        "algorithms": len({one.algorithm for one in results}),
        "games": len({one.game for one in results}),
        "hours": sum(one.seconds for one in results) / 3600,
        "commits": len(commits) if made else 0,
        "versions": sorted(versions),
    }


def _usual_first(one: Chain) -> bool:
    usual, spec = chain.ChainSpec(), one.record["arguments"]
    return bool((spec["retreat"], spec["end"]) != (usual.retreat, usual.end))


def _early(readings: list[dict[str, Any]]) -> dict[str, Any] | None:
    """In how many readings CBSQL has the best mean of the paper's algorithms, by window."""
    complete = [dict(r["table"]) for r in readings if len(r["windows"]) == len(chain.WINDOWS)]
    paper = list(chain.COLOURS)[:5]
    complete = [table for table in complete if set(paper) <= set(table)]
    if not complete:
        return None
    ahead = [
        sum(max(paper, key=lambda name: table[name][i]) == "CBSQL" for table in complete)
        for i in range(len(chain.WINDOWS))
    ]
    return {"windows": list(zip(chain.WINDOWS, ahead, strict=True)), "readings": len(complete)}


def _order(result: Result) -> tuple[Any, ...]:
    return _suite(result), result.game, _rank(result.algorithm), result.seed


def _rank(algorithm: str) -> tuple[int, str]:
    known = list(curves.COLOURS)
    name = " ".join(algorithm.split()[:2])
    return (known.index(name) if name in known else len(known)), algorithm


def _suite(result: Result) -> tuple[str, int, str]:
    """Runs that may be compared: the same kind of game, training time and protocol."""
    if result.is_atari:
        return "Atari", result.frames, f"frames, {result.protocol} protocol"
    kind = result.game.split("/")[0] if result.game.startswith("MinAtar/") else result.game
    return kind, result.steps, "steps"


def _in_group(result: Result) -> Result:
    """Without what all runs of its group have in common, which is no setting of its own."""
    common = f" protocol={result.protocol}"
    return replace(result, algorithm=result.algorithm.replace(common, ""))


def _by_group(results: Iterable[Result]) -> Iterable[tuple[str, Iterable[Result]]]:
    for (kind, time, unit), rows in groupby(sorted(results, key=_order), key=_suite):
        yield f"{kind}, {time:,} {unit}", rows


def _group(name: str, results: list[Result]) -> dict[str, Any]:
    """All that is said about runs that may be compared."""
    tested = all(len(result.scores("game")) for result in results)
    games = sorted({result.game for result in results})
    algorithms = sorted({result.algorithm for result in results}, key=_rank)
    scores = scores_by_seed(results, "test" if tested else "training")
    styles = _styles(algorithms)
    return {
        "name": name,
        "legend": list(styles.values()),
        "measure": "test games" if tested else "the last 100 training games",
        "algorithms": algorithms,
        "rows": [(game, [_cell(scores[game, a]) for a in algorithms]) for game in games],
        "charts": [_chart(game, results, styles) for game in games],
        **_compare(games, styles, scores, human=all(game in HUMAN for game in games)),
    }


def _cell(by_seed: dict[int, float]) -> dict[str, Any] | None:
    """Mean over runs, and its interval where there are enough of them."""
    if not by_seed:
        return None
    values = np.array(list(by_seed.values()))
    return {"runs": len(values), "mean": float(values.mean()), "interval": _interval(values)}


def _interval(means: Floats) -> list[float] | None:
    return mean_interval(means).tolist() if len(means) >= LEAST_RUNS else None


def _compare(
    games: list[str],
    styles: dict[str, dict[str, Any]],
    scores: Scores,
    human: bool,
) -> dict[str, Any]:
    """Statistics over games: counting beside what it is to improve, and averages.

    Two algorithms are compared on the games for which both have runs enough. Averages are of those
    that have them for the most games. Runs with settings of their own ("=") stand apart.
    """
    enough = {a: [g for g in games if len(scores[g, a]) >= LEAST_RUNS] for a in styles}
    plain = [a for a in styles if "=" not in a]

    pairs = [
        compare(scores, ours, other, games)
        for ours in plain
        for other in plain
        if _counts_updates(ours) and not _counts_updates(other)
        if _is_rainbow(ours) == _is_rainbow(other)
    ]
    made = [one for one in pairs if one]
    improvements = [_improvement(*both) for both in zip(made, verdicts(made), strict=True)]
    most = max((len(enough[a]) for a in plain), default=0)
    averaged = [a for a in plain if len(enough[a]) == most]
    shared = [g for g in games if all(g in enough[a] for a in averaged)]
    none: dict[str, Any] = {"aggregates": [], "profile": None, "scale": "", "games": len(shared)}
    none["improvements"] = improvements
    if len(shared) < 2 or len(averaged) < 2:
        return none  # over one game there is nothing to average
    tables = {a: score_table(scores, a, shared) for a in averaged}
    if any(len(rows) < LEAST_RUNS for rows in tables.values()):
        return none
    everything = np.concatenate(list(tables.values()))  # (runs of all algorithms, games)
    low, high = everything.min(0), everything.max(0)
    if human:
        scaled = {
            a: np.stack([human_normalised(g, t[:, i]) for i, g in enumerate(shared)], axis=1)
            for a, t in tables.items()
        }
    elif (high > low).any():
        told = high > low  # games in which all scored the same tell nothing
        scaled = {a: (t - low)[:, told] / (high - low)[told] for a, t in tables.items()}
    else:
        return none
    thresholds = np.linspace(0, 1, 41)
    return {
        **none,
        "scale": "human" if human else "range",
        "aggregates": [
            {
                "algorithm": a,
                "iqm": float(interquartile_mean(table)),
                "interval": bootstrap_interval(interquartile_mean, table).tolist(),
            }
            for a, table in scaled.items()
        ],
        "profile": {
            "series": [
                {
                    **styles[a],
                    "x": thresholds,
                    "y": performance_profile(table, thresholds),
                    **_band(
                        bootstrap_interval(lambda x: performance_profile(x, thresholds), table)
                    ),
                }
                for a, table in scaled.items()
            ],
        },
    }


def _counts_updates(algorithm: str) -> bool:
    return algorithm.split()[0].endswith("cbsql")


def _is_rainbow(algorithm: str) -> bool:
    return algorithm.startswith("rainbow")


def _improvement(one: Comparison, verdict: str) -> dict[str, Any]:
    interval = bootstrap_interval(probability_of_improvement, one.x, one.y).tolist()
    return {"comparison": one, "verdict": verdict, "interval": interval}


def _styles(algorithms: list[str]) -> dict[str, dict[str, Any]]:
    """Those of the paper look the same in every group, others differ within theirs."""
    spare = ((colour, dash) for dash in _SPARE_DASHES for colour in curves.OTHER_COLOURS)
    styles: dict[str, dict[str, Any]] = {}
    for name in algorithms:
        # DQN and Rainbow look the same, and so on: the second of two in a group gets another look.
        colour, dash = curves.COLOURS.get(name, ""), _dash(name)
        if not colour or any((s["colour"], s["dash"]) == (colour, dash) for s in styles.values()):
            colour, dash = next(spare)
        styles[name] = _style(title(name), colour, dash)
    return styles


def _style(name: str, colour: str, dash: str) -> dict[str, Any]:
    return {"name": name, "colour": colour, "dash": dash, "strong": "cbsql" in name.lower()}


def _dash(algorithm: str) -> str:
    return _DASHES.get(algorithm.lower().removeprefix("rainbow-"), "")


def _band(ends: Floats) -> dict[str, Floats]:
    return {"low": ends[0], "high": ends[1]}


def _chart(game: str, results: list[Result], styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Curves of one game: means over seeds, with bands from the lowest seed to the highest."""
    series = []
    for algorithm, looks in styles.items():
        runs = [r for r in results if (r.game, r.algorithm) == (game, algorithm) and len(r.curve)]
        if not runs:
            continue
        stacked = np.stack([run.curve for run in runs])  # (seeds, bins, 5)
        steps = stacked[0, :, 0]
        seconds = np.mean([run.seconds for run in runs])
        style = {**looks, "seeds": len(runs)}
        style["steps"] = steps
        style["frames"] = steps * (runs[0].frames / runs[0].steps)
        style["hours"] = steps / runs[0].steps * seconds / 3600
        for column, quantity in ((1, "score"), (3, "beta"), (4, "count")):
            values = stacked[:, :, column]
            # Where some seed has nothing to show, neither has the mean.
            if np.isfinite(values).all(0).any():
                mean, low, high = values.mean(0), values.min(0), values.max(0)
                style[quantity] = {"y": mean, "low": low, "high": high}
        series.append(style)
    return {"game": game, "series": series}


def _chain(one: Chain) -> dict[str, Any]:
    spec = one.record["arguments"]
    windows = [(a, b) for a, b in chain.WINDOWS if b <= min(map(len, one.curves.values()))]
    series = []
    for name, rows in one.curves.items():
        points = len(rows) // EPISODES_PER_POINT
        means = rows[: points * EPISODES_PER_POINT].reshape(points, EPISODES_PER_POINT, 3).mean(1)
        middle = EPISODES_PER_POINT * (np.arange(points) + 0.5) + 0.5
        ends = _band(means[:, 1:].T)
        style = _style(name, chain.COLOURS.get(name, curves.OTHER_COLOURS[0]), _dash(name))
        style["extra"] = name in list(chain.COLOURS)[5:]
        series.append({**style, "x": middle, "y": means[:, 0], **ends})
    return {
        "name": f"{spec['retreat']}, {spec['end']}",
        "runs": spec["runs"],
        "optimum": chain.optimal_return(Retreat[spec["retreat"]]),
        "windows": windows,
        "table": [
            (name, [float(rows[a - 1 : b, 0].mean()) for a, b in windows])
            for name, rows in one.curves.items()
        ],
        "series": series,
    }


def _paper_tables(results: list[Result]) -> list[dict[str, Any]]:
    """Both tables and, if there are such runs, both with their frames taken for agent steps."""
    parts = [
        _paper_table(table, results, in_steps)
        for in_steps in (False, True)
        for table in (TABLE_1, TABLE_2)
    ]
    return [part for part in parts if part["run"] or not part["in_steps"]]


def _paper_table(table: Table, results: list[Result], in_steps: bool) -> dict[str, Any]:
    """The paper's cells beside ours, of runs that are as long as its own."""
    frames = table.frames * (FRAME_SKIP if in_steps else 1)
    ours: dict[tuple[str, str], list[Result]] = {key: [] for key in table.published}
    for result in results:
        key = (result.game, result.algorithm)
        if key in ours and result.frames == frames and result.protocol == "nature":
            ours[key].append(result.with_last_games(table.test_games))
    return {
        "table": table,
        "name": f"{table.title} in steps" if in_steps else table.title,
        "in_steps": in_steps,
        "frames": frames,
        "claim": examine(table, [run for runs in ours.values() for run in runs]),
        "rows": [
            (
                game,
                [
                    {"published": table.published[game, a], **_ours(table, game, a, ours[game, a])}
                    for a in table.algorithms
                ],
            )
            for game in table.games
        ],
        "run": sum(map(bool, ours.values())),
        "cells": len(ours),
    }


def _ours(table: Table, game: str, algorithm: str, runs: list[Result]) -> dict[str, Any]:
    tested = [run for run in runs if len(run.scores("game"))]
    cell: dict[str, Any] = {"runs": len(runs), "tested": len(tested), "kinds": []}
    cell["training"] = _cell({run.seed: run.training for run in runs})
    published = table.published[game, algorithm][0]
    for kind in ("game", "life"):
        played = [scores for run in tested if len(scores := run.scores(kind))]
        if played:
            means = np.array([scores.mean() for scores in played])
            pooled = np.concatenate(played)
            cell["kinds"].append(
                {
                    "kind": kind,
                    "mean": float(means.mean()),
                    "deviation": float(pooled.std(ddof=1)) if len(pooled) > 1 else math.nan,
                    "interval": _interval(means),
                    "difference": float(means.mean()) - published,
                    "human": float(human_normalised(game, means).mean())
                    if kind == "game"
                    else None,
                }
            )
    return cell


def _row(result: Result, out: Path) -> dict[str, Any]:
    tests = result.scores("game")
    return {
        "result": result,
        "test": float(tests.mean()) if len(tests) else math.nan,
        "link": _link(result.folder, out),
    }


def _chain_row(one: Chain, out: Path) -> dict[str, Any]:
    spec = one.record["arguments"]
    shown = {key: one.record.get(key) or "" for key in ("command", "commit", "seconds")}
    return {**shown, "seed": spec.get("seed", ""), "link": _link(one.folder, out), "spec": spec}


def _link(folder: Path, out: Path) -> str:
    """Relative, so that the page may be moved together with the runs."""
    return Path(os.path.relpath(folder, out)).as_posix()


def _finite(value: Any) -> Any:
    """For JSON: arrays as lists of five digits, and null where there is no number."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
