"""The report: its numbers against hand-worked ones, its page in a real browser, damaged input."""
# ruff: noqa: RUF001 (the page has true minus signs, dashes and apostrophes)

import csv
import json
import os
import re
import shutil
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from browser import open_browser
from typer.testing import CliRunner

from cbsql.cli import app
from cbsql.experiments import curves
from cbsql.experiments.paper import TABLE_2
from cbsql.experiments.report.collect import collect
from cbsql.experiments.report.page import make_page, make_tables, number, title
from cbsql.experiments.runner import COLUMNS

ROOT = Path(__file__).parents[1]


def write_run(
    folder, game="breakout", algorithm="cbsql", seed=0, steps=750_000, level=1, beta=100.0, **more
):
    """A run of 50 games at even distances: scores grow from `level` to 50 `level`."""
    folder.mkdir(parents=True)
    spec = {"game": game, "algorithm": algorithm, "beta": beta, "kappa": 0.01, "seed": seed}
    record = {
        "spec": {**spec, "protocol": "nature", "settings": {}},
        **{"finished": True, "steps": steps, "updates": 7, "seconds": 7200, "commit": "abc"},
        **{"command": "cbsql train", "machine": {}, "versions": {"cbsql": "0.1.0"}, **more},
    }
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "episodes.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for i in range(1, 51):
            rows.writerow(("game", i * steps // 50, 0, 0, 0, level * i, 5))
    beta = "".join(f"{i * steps // 50},{i},{100 * i}\n" for i in range(1, 51))
    header = "time/total_timesteps,train/beta_mean,train/count_mean\n"
    (folder / "progress.csv").write_text(header + (beta if "cbsql" in algorithm else ""))
    return folder


def write_tests(folder, games, lives=()):
    rows = [("game", score, 9) for score in games] + [("life", score, 3) for score in lives]
    with (folder / "test.csv").open("w") as file:
        csv.writer(file).writerows([("kind", "score", "length_steps"), *rows])


def report(*arguments, cwd):
    with chdir(cwd):
        done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


@contextmanager
def chdir(folder):  # contextlib has one from Python 3.11 on
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as open_page:
        yield open_page


def cell(page, table, game, column):
    """The text of a cell of one of the paper's tables."""
    return page.evaluate(
        f"[...document.querySelectorAll('.paper')[{table}].querySelectorAll('tbody tr')]"
        f".find((row) => row.cells[0].textContent === '{game}').cells[{column}]"
        ".innerText.replace(/\\s+/g, ' ')"
    )


def test_kept_tables_keep_the_protocol(tmp_path):
    for protocol in ("nature", "machado"):
        run = write_run(tmp_path / "runs" / protocol)
        record = json.loads((run / "run.json").read_text())
        record["spec"]["protocol"] = protocol
        (run / "run.json").write_text(json.dumps(record))
    (tmp_path / "kept").mkdir()
    curves.write_tables(map(curves.read_run, (tmp_path / "runs").iterdir()), tmp_path / "kept")
    kept, made = (collect([tmp_path / name]).results for name in ("kept", "runs"))
    assert {(run.protocol, len(run.curve)) for run in kept} == {("nature", 50), ("machado", 50)}
    assert {run.key for run in kept} == {run.key for run in made}


def test_the_papers_table_has_its_numbers_and_ours(tmp_path, browser):
    for seed, mean in enumerate((8.0, 10.0, 12.0)):
        run = write_run(tmp_path / f"cbsql-{seed}", seed=seed)
        # Only the last 100 count: before them are games that would change every figure.
        write_tests(
            run, [999.0] * 5 + [mean - 1, mean + 1] * 50, lives=[0] * 20 + [0.24 * mean] * 100
        )
    for seed in range(2):
        run = write_run(tmp_path / f"dqn-{seed}", algorithm="dqn", seed=seed)
        write_tests(run, [5.9 + seed] * 100)
    write_run(tmp_path / "sql", algorithm="sql")
    write_run(tmp_path / "short", game="pong", steps=1000)
    out = tmp_path / "report"
    assert report(".", cwd=tmp_path).exit_code == 0
    page = browser(out / "index.html")
    findings = page.evaluate("document.querySelector('.findings').innerText.replace(/\\s+/g, ' ')")
    groups = "Atari, 4,000 frames, nature protocol; Atari, 3,000,000 frames, nature protocol"
    assert f"Too little to compare: {groups}. That takes" in findings
    ours = cell(page, 0, "breakout", 4)
    # Deviation of games around 8, 10 and 12, each 1 from its mean: sqrt((4 + 0 + 4) / 3 + 1).
    assert "paper 8.2 ± 6.1" in ours
    # Student's 97.5% quantile of two degrees of freedom is 4.303, and 4.303 * 2 / sqrt(3) is 4.97.
    assert "game 10.0 ± 1.92 [5.03, 15.0] +1.80" in ours
    assert "human-normalised 28.8%" in ours  # (10 - 1.7) / (30.5 - 1.7)
    # Lives all count. Their mean square is 0.24² (8² + 10² + 12²) / 3 * 100 / 120 = 4.928.
    assert "life 2.00 ± 0.965 [1.01, 2.99] −6.20" in ours
    dqn = cell(page, 0, "breakout", 1)
    assert "game 6.40" in dqn
    assert "2 seeds: no interval" in dqn
    assert "+0.500" in dqn
    assert "training 25.5" in dqn  # of the 50 training games, with scores from 1 to 50
    assert cell(page, 0, "breakout", 2) == "paper 5.9 ± 4.5 not tested training 25.5"
    assert cell(page, 0, "pong", 4) == "paper 17.56 ± 2 not run"  # runs of other lengths are none
    assert "not run" in cell(page, 1, "qbert", 3)
    assert "freeway, qbert, seaquest, as in the paper: undecided." in findings
    rows = [x for x in (out / "tables.md").read_text().splitlines() if "| breakout" in x]
    assert rows[:4] == [
        "| breakout | DQN | 5.9 ± 5.9 | 2 | 6.40 ± 0.501 | +0.500 | | | 25.5 |",
        "| breakout | SQL β=100 | 5.9 ± 4.5 | 1 | not tested | | | | 25.5 |",
        "| breakout | SQL β=1000 | 5.1 ± 4.7 | | not run | | | | |",
        "| breakout | CBSQL | 8.2 ± 6.1 | 3 | 10.0 ± 1.92 [5.03, 15.0] | +1.80 | "
        "2.00 ± 0.965 [1.01, 2.99] | −6.20 | 25.5 [25.5, 25.5] |",
    ]


def test_the_papers_claim_is_judged(tmp_path):
    for game in ("breakout", "qbert"):
        for level, algorithm in enumerate(("rainbow-cbsql", *TABLE_2.algorithms[:-1])):
            for seed in range(3):
                run = write_run(
                    *(tmp_path / f"{game}-{algorithm}-{seed}", game, *algorithm.split()[:1]),
                    *(seed, 125_000, level + 1 + seed / 10),
                    beta=float(algorithm.split()[-1]) if " " in algorithm else 100.0,
                )
                # Of more games than the paper's, as many as the paper's count.
                write_tests(run, [99.0 - 50 * level] * 30 + [level + seed / 10] * 50)
    lines = make_tables(collect([tmp_path])).splitlines()
    counted = "2 of 2 games, 3 and 3 seeds"
    below = f"scores lower than it (0.00, p = 0.005; {counted})"  # 2 of 20² exchanges
    assert "Here that **does not hold**, judged by the games in which both" in "\n".join(lines)
    assert [line for line in lines if " than it " in line] == [
        f"| {name} | {below} | {below} |"
        for name in ("Rainbow", "Rainbow-SQL β=100", "Rainbow-SQL β=1000")
    ]
    assert "highest in breakout, qbert, as in the paper : does not hold ." in findings(tmp_path)


def test_runs_of_as_many_steps_have_a_table_of_their_own(tmp_path):
    def captions():
        lines = make_tables(collect([tmp_path])).splitlines()
        return [line for line in lines if line.startswith("Table")]

    write_tests(write_run(tmp_path / "short", algorithm="rainbow", steps=125_000), [2.0] * 50)
    last = "the last 50 test episodes; 1 of 8 cells run."
    assert captions()[1:] == [f"Table 2: 500,000 frames, {last}"]
    write_tests(write_run(tmp_path / "long", algorithm="rainbow", steps=500_000), [9.0] * 50)
    assert captions()[1:] == [
        f"Table 2: 500,000 frames, {last}",
        f"Table 2 in steps: 2,000,000 frames, {last}",
    ]
    rows = [x for x in make_tables(collect([tmp_path])).splitlines() if "9.00" in x]
    assert rows == ["| breakout | Rainbow | 10.2 ± 4.9 | 1 | 9.00 ± 0 | −1.20 | | | 25.5 |"]


def test_what_is_kept_of_the_report_is_that_of_the_results():
    found, kept = collect([ROOT / "results"]), ROOT / "results" / "report"
    again = "cbsql report results --out results/report"
    assert make_page(found, kept) == (kept / "index.html").read_text(), again
    tables = make_tables(found)
    assert tables == (kept / "tables.md").read_text(), again
    assert tables.strip() in (ROOT / "docs" / "reproduction.md").read_text()


def findings(root):
    page = make_page(collect([root]), root)
    text = re.sub(r"<[^>]+>|\s+", " ", page.partition('class="findings"')[2].partition("</ul>")[0])
    return re.sub(r" +", " ", text)


def test_side_runs_do_not_hide_the_comparison(tmp_path):
    for game in ("breakout", "pong"):
        for seed in range(5):
            for algorithm, level in (
                ("dqn", 1),
                ("cbsql", 2),
                ("rainbow", 5),
                ("rainbow-cbsql", 4),
            ):
                name = f"{game}-{algorithm}-{seed}"
                write_run(tmp_path / name, game, algorithm, seed, 1000, level + seed / 100)
    expected = findings(tmp_path)
    assert "CBSQL scores higher than DQN (2 games:" in expected
    assert "Rainbow-CBSQL scores lower than Rainbow (2 games:" in expected
    write_run(tmp_path / "munchausen", "pong", "munchausen", 0, 1000)
    for seed in range(3):
        ablation = write_run(tmp_path / f"ablation-{seed}", "pong", "rainbow", seed, 1000)
        record = json.loads((ablation / "run.json").read_text())
        record["spec"]["settings"] = {"double": "False"}
        (ablation / "run.json").write_text(json.dumps(record))
    assert findings(tmp_path) == expected
    page = make_page(collect([tmp_path]), tmp_path)
    assert page.count("Interquartile mean over games") == 1


def test_protocols_are_groups_like_any_other(tmp_path):
    for algorithm, level in (("dqn", 1), ("cbsql", 2)):
        for game in ("breakout", "pong"):
            for seed in range(3):
                run = write_run(tmp_path / f"{game}-{algorithm}-{seed}", game, algorithm, seed)
                record = json.loads((run / "run.json").read_text())
                record["spec"]["protocol"] = "machado"
                (run / "run.json").write_text(json.dumps(record))
                rows = (run / "episodes.csv").read_text().splitlines()
                rows[1:] = [f"game,{i},0,0,0,{level},5" for i in range(50)]
                (run / "episodes.csv").write_text("\n".join(rows))
    assert "machado protocol : CBSQL scores higher than DQN (2 games:" in findings(tmp_path)
    page = make_page(collect([tmp_path]), tmp_path)
    assert page.count("Interquartile mean over games") == 1
    assert "CBSQL protocol=machado</td>" in page  # in the list of runs


def test_one_bad_table_does_not_spoil_the_page(tmp_path):
    write_run(tmp_path / "good")
    kept = shutil.copytree(ROOT / "results" / "cartpole", tmp_path / "kept")
    lines = (kept / "curves.csv").read_text().splitlines()
    (kept / "curves.csv").write_text("\n".join(lines[:-3]) + "\n")
    done = report(".", cwd=tmp_path)
    assert done.exit_code == 0
    assert "curves.csv has 47 rows of CartPole-v1" in done.stdout


def test_what_is_no_run_and_what_is_there_twice(tmp_path):
    done = report(ROOT / "results" / "counts", cwd=tmp_path)
    assert done.exit_code == 2
    assert "counts holds no runs" in done.stderr
    chain = ROOT / "results" / "chain" / "back-timelimit"
    found = collect([chain, chain])
    assert len(found.chains) == 1
    assert "already" in found.unread[0][1]


def test_the_repositorys_results_are_all_there(tmp_path, browser):
    page_text = make_page(collect([ROOT / "results"]), tmp_path)
    assert page_text == make_page(collect([ROOT / "results"]), tmp_path)  # the same, byte by byte
    (tmp_path / "index.html").write_text(page_text)
    assert len(page_text) < 1_000_000
    runs, made = 0, []
    for table in (ROOT / "results").glob("*/runs.csv"):
        tests = defaultdict(list)
        if (table.parent / "tests.csv").exists():
            for row in csv.DictReader((table.parent / "tests.csv").open()):
                if row["kind"] == "game":
                    tests[row["game"], row["algorithm"], row["seed"]].append(float(row["score"]))
        for row in csv.DictReader(table.open()):
            runs += 1
            tested = tests[row["game"], row["algorithm"], row["seed"]]
            atari = row["game"] not in gymnasium.registry
            group = "Atari" if atari else row["game"].split("/")[0], row["steps"]
            made.append((group, f"{row['game']} {title(row['algorithm'])}", tested, row))
    untested = {group for group, _, tested, _ in made if not tested}
    scores = defaultdict(list)
    for group, name, tested, row in made:
        own = float(row["last_100_games"]) if group in untested else np.mean(tested)
        scores[name].append(own)
    page = browser(tmp_path / "index.html")
    assert page.evaluate("document.querySelectorAll('#all tbody tr').length") == runs
    shown = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('section[aria-labelledby=numbers] td b')]"
        ".map((b) => b.closest('td')).filter((td) => /score/.test(td.closest('table').caption"
        ".textContent)).map((td) => [`${td.parentElement.cells[0].textContent} `"
        " + td.closest('table').tHead.rows[0].cells[td.cellIndex].textContent,"
        " td.querySelector('b').textContent]))"
    )
    assert shown == {run: number(np.mean(values)) for run, values in scores.items()}
    for link in page.evaluate("[...document.querySelectorAll('#all a')].map((a) => a.href)"):
        assert Path(link.removeprefix("file://")).is_dir()


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Two algorithms with five seeds in two games, CBSQL twice as good, and a chain-walk."""
    root = tmp_path_factory.mktemp("example")
    for game in ("Breakout", "Asterix"):
        for algorithm, level in (("dqn", 1), ("cbsql", 2)):
            for seed in range(5):
                name = f"runs/{game}-{algorithm}-{seed}"
                write_run(
                    *(root / name, f"MinAtar/{game}-v1", algorithm, seed, 50_000),
                    level + seed / 100,
                    command=f"cbsql train </script><script>alert({seed})",
                )
    shutil.copytree(ROOT / "results" / "chain" / "back-timelimit", root / "runs" / "chain")
    assert report("runs", cwd=root).exit_code == 0
    return root / "report" / "index.html"


@pytest.mark.parametrize(
    "look", [{}, {"dark": True}, {"width": 390, "height": 844}], ids=["light", "dark", "phone"]
)
def test_the_page_is_drawn_offline_without_complaints(example, browser, look):
    page = browser(example, **look)
    assert page.complaints == []
    assert page.requests == [example.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelectorAll('.chart svg').length") == 1 + 2 + 2 + 1
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert ink == ("rgb(236, 236, 234)" if look.get("dark") else "rgb(29, 29, 31)")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).color") != ink


def test_the_verdict_is_that_of_the_scores(example, browser):
    page = browser(example)
    text = page.evaluate("document.querySelector('.findings').innerText.replace(/\\s+/g, ' ')")
    assert (
        "CBSQL scores higher than DQN (2 games: a run scores higher with probability 1.00" in text
    )


READOUT = "document.querySelector('{} .readout').innerText"


def test_curves_are_followed_by_pointer_and_keys(example, browser):
    page = browser(example)
    place = "[data-quantity=score] figure:nth-child(2) .chart"  # MinAtar/Breakout-v1
    assert "Breakout" in page.evaluate(
        f"document.querySelector('{place}').previousSibling.textContent"
    )
    page.move(f"{place} svg", x=0.999)
    read = page.evaluate(READOUT.format(place))
    assert read.split("\n") == ["steps 50K", "DQN 51", "CBSQL 101"]  # 50 (level + 0.02)
    page.evaluate(f"document.querySelector('{place} svg').focus()")
    for key, steps in (("Home", "1000"), ("ArrowRight", "2000"), ("End", "50K")):
        page.press(key)
        assert page.evaluate(READOUT.format(place)).startswith(f"steps {steps}")
    page.press("Escape")
    assert page.evaluate(READOUT.format(place)) == ""
    page.click("input[value=hours]")
    page.evaluate(f"document.querySelector('{place} svg').focus()")
    page.press("End")
    assert page.evaluate(READOUT.format(place)).startswith("hours 2\n")
    page.click(".legend:has(+ [data-quantity=score]) button:first-child")
    page.evaluate(f"document.querySelector('{place} svg').focus()")
    page.press("End")
    assert page.evaluate(READOUT.format(place)).split("\n") == ["hours 2", "CBSQL 101"]
    trust = "[data-trust] .chart"
    for value, shown in (("beta", "CBSQL 50"), ("count", "CBSQL 5000")):
        page.click(f"input[value={value}]")
        page.evaluate(f"document.querySelector('{trust} svg').focus()")
        page.press("End")
        assert page.evaluate(READOUT.format(trust)).endswith(shown)
    assert page.complaints == []


def test_controls_of_chain_and_list(example, browser):
    page = browser(example)
    lines = "document.querySelectorAll('#chain-chart .ink').length"
    assert page.evaluate(lines) == 5
    page.click("#extras")
    assert page.evaluate(lines) == 8
    page.click("#chain-legend button")
    assert page.evaluate(lines) == 7
    on = "[...document.querySelectorAll('#chain-legend button[aria-pressed=true]')]"
    page.evaluate(f"{on}.forEach((button) => button.click())")
    assert page.evaluate(lines) == 0
    page.move("#chain-chart svg")
    page.evaluate("document.querySelector('#chain-chart svg').focus()")
    page.press("End")
    assert page.complaints == []
    shown = "[...document.querySelectorAll('#all tbody tr')].filter((row) => !row.hidden).length"
    assert page.evaluate(shown) == 20
    page.evaluate(
        "(() => { const f = document.getElementById('filter'); f.value = 'asterix cbsql';"
        "f.dispatchEvent(new Event('input')); })()"
    )
    assert page.evaluate(shown) == 5
    assert page.evaluate("document.getElementById('shown').textContent") == "5 of 20 runs"
    page.click("#all tbody tr:not([hidden]) .copy")
    assert "</script>" in page.evaluate("getSelection().toString()")
    assert page.complaints == []


DAMAGES = {
    "truncated record": lambda run: (run / "run.json").write_text('{"command": "cbs'),
    "record of nothing": lambda run: (run / "run.json").write_text("null"),
    "no record": lambda run: (run / "run.json").unlink(),
    "no scores": lambda run: (run / "episodes.csv").unlink(),
    "half a line": lambda run: (run / "episodes.csv").write_text(",".join(COLUMNS) + "\ngame,12"),
    "binary": lambda run: (run / "progress.csv").write_bytes(bytes(range(128, 256))),
    "zeros": lambda run: (run / "episodes.csv").write_bytes(b"kind,steps\n" + bytes(200_000)),
    "no number": lambda run: (run / "test.csv").write_text("kind,score,length_steps\ngame,x,1\n"),
    "no steps": lambda run: (run / "run.json").write_text(
        json.dumps({"spec": {"game": "pong", "algorithm": "dqn", "seed": 1}, "finished": True})
    ),
    "unfinished": lambda run: (run / "run.json").write_text(
        json.dumps({"spec": {"game": "pong"}, "finished": False})
    ),
}


def test_damaged_runs_are_listed_and_the_rest_is_shown(tmp_path, browser):
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "good again")
    write_run(tmp_path / "runs" / "newer", seed=1, versions={"cbsql": "9.9.9"})
    for name, damage in DAMAGES.items():
        damage(write_run(tmp_path / "runs" / name, seed=2))
    (tmp_path / "empty").mkdir()
    done = report("runs", "empty", "nowhere", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    page = browser(tmp_path / "report" / "index.html")
    assert page.evaluate("document.querySelectorAll('#all tbody tr').length") == 2
    listed = page.evaluate(
        "[...document.querySelectorAll('#unread ~ ul li')].map((item) => item.innerText)"
    )
    expected = {*(f"runs/{name}" for name in DAMAGES), "runs/good again", "empty", "nowhere"}
    folders = {next(name for name in expected if item.startswith(name + " ")) for item in listed}
    assert folders == expected
    assert len(listed) == len(expected)
    assert "several versions of cbsql (0.1.0, 9.9.9)" in page.evaluate(
        "document.body.innerText.replace(/\\s+/g, ' ')"
    )
    text = " ".join(done.stdout.split())
    assert "runs/unfinished is not finished" in text
    assert "nowhere is not a folder" in text


def test_nothing_to_report_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("in the way")
    done = report("empty", cwd=tmp_path)
    assert done.exit_code == 2
    assert "There is nothing to report: empty holds no runs." in " ".join(done.stderr.split())
    write_run(tmp_path / "run")
    done = report("run", "--out", "file/out", cwd=tmp_path)
    assert done.exit_code == 2
    assert "The output folder file/out cannot be written" in " ".join(done.stderr.split())
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (5.2499, "5.25"),
        (-0.126, "−0.126"),
        (999.7, "1,000"),
        (1234.5, "1,234"),
        (np.nan, "–"),
        (278, "278"),
    ],
)
def test_numbers_have_three_digits(value, shown):
    assert number(value) == shown


def test_names_in_prose():
    names = ("dqn", "sql 100", "rainbow-cbsql", "munchausen", "cbsql kappa=0.1")
    shown = ["DQN", "SQL β=100", "Rainbow-CBSQL", "Munchausen", "CBSQL kappa=0.1"]
    assert [title(name) for name in names] == shown


@pytest.mark.slow
def test_the_demo_ends_with_its_pages(tmp_path, browser):
    with chdir(tmp_path):
        done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 0, done.output
    page = browser(tmp_path / "runs" / "demo" / "report" / "index.html")
    assert page.complaints == []
    assert page.evaluate("document.querySelectorAll('#all tbody tr').length") == 3
    assert page.evaluate("document.querySelectorAll('#chain-chart .ink').length") == 5
    page = browser(tmp_path / "runs" / "demo" / "view.html")
    page.wait_for("document.documentElement.dataset.ready")
    assert page.complaints == []
