"""Learning curves from the folders of runs."""

import csv
import json
from pathlib import Path

import pytest

from cbsql.experiments import curves
from cbsql.experiments.runner import COLUMNS

ROOT = Path(__file__).parents[1]


def write_run(folder, seed, scores, finished=True):
    """Two games in each of 50 bins of 10 steps, except for the first bin."""
    folder.mkdir()
    record = {
        "spec": {"game": "CartPole-v1", "algorithm": "sql", "beta": 100.0, "seed": seed},
        **{"finished": finished, "steps": 500, "updates": 7, "seconds": 1.5},
        **{"commit": "abc", "command": "cbsql train", "machine": {}, "versions": {}},
    }
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "episodes.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for i, score in enumerate(scores):
            steps = 15 + 5 * i
            rows.writerow(("life", steps, steps, 0, 0, -1, 5))
            rows.writerow(("game", steps, steps, 0, 0, score, 5))
    (folder / "progress.csv").write_text(
        "time/total_timesteps,train/beta_mean,train/count_mean\n5,,\n15,2,200\n20,4,400\n"
    )
    (folder / "test.csv").write_text("kind,score,length_steps\nlife,1.0,5\ngame,1.0,5\n")
    return folder


def keep(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["curves", *map(str, arguments)])
    curves.main()


def test_scores_are_averaged_in_each_part_of_a_run(tmp_path, monkeypatch):
    scores = list(range(98))
    folders = [write_run(tmp_path / str(seed), seed, scores) for seed in range(2)]
    keep(monkeypatch, *folders, "--out", tmp_path)
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert len(rows) == 2 * 50
    assert rows[0]["algorithm"] == "sql 100"
    assert (rows[0]["steps"], rows[0]["score"], rows[0]["beta"]) == ("10", "", "")
    # Steps 15 and 20: games 0 and 1, and two logs.
    assert [rows[1][name] for name in curves.CURVE_COLUMNS[3:]] == ["20", "0.5", "2", "3", "300"]
    assert float(rows[49]["score"]) == pytest.approx((96 + 97) / 2)
    runs = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [run["seed"] for run in runs] == ["0", "1"]
    assert float(runs[0]["last_100_games"]) == pytest.approx(sum(scores) / 98, rel=1e-3)
    tests = (tmp_path / "tests.csv").read_text().splitlines()
    assert tests[1:3] == ["CartPole-v1,sql 100,0,life,1.0,5", "CartPole-v1,sql 100,0,game,1.0,5"]
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_unfinished_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not finished"):
        curves.read_run(write_run(tmp_path / "run", 0, [], finished=False))


def test_a_name_says_what_is_not_as_usual():
    def name(**spec):
        return curves.name_of(spec)

    assert name(algorithm="rainbow-sql", beta=1000.0, settings={"double": "False"}) == (
        "rainbow-sql 1000 double=False"
    )
    assert name(algorithm="cbsql", beta=100.0, kappa=0.1) == "cbsql kappa=0.1"
    assert name(algorithm="dqn", beta=100.0, kappa=0.1) == "dqn"
    assert name(algorithm="dqn", protocol="machado") == "dqn protocol=machado"


def test_runs_are_added_to_tables_as_they_come(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / str(seed), seed, range(seed, 98)) for seed in range(3)]
    for folder in folders[1:]:
        keep(monkeypatch, folder, "--out", tmp_path / "one_by_one")
    (folders[1] / "run.json").unlink()  # its tables are all that is left
    keep(monkeypatch, folders[0], folders[2], "--out", tmp_path / "one_by_one")
    write_run(tmp_path / "again", 1, range(1, 98))
    keep(monkeypatch, folders[0], tmp_path / "again", folders[2], "--out", tmp_path / "at_once")
    for name in ("curves.csv", "runs.csv", "tests.csv", "machines.json"):
        written = [(tmp_path / out / name).read_bytes() for out in ("one_by_one", "at_once")]
        assert written[0] == written[1]
    assert len((tmp_path / "at_once" / "runs.csv").read_text().splitlines()) == 1 + 3


@pytest.mark.parametrize("folder", sorted(ROOT.glob("results/*/machines.json")), ids=str)
def test_kept_tables_survive_reading_and_writing(folder, tmp_path):
    curves.write_tables(curves.read_tables(folder.parent), tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder.parent / path.name).read_bytes()


def test_two_lengths_of_one_run_are_refused(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 0, range(98))
    keep(monkeypatch, run, "--out", tmp_path / "kept", "--until", 100)
    with pytest.raises(ValueError, match="two runs of"):
        keep(monkeypatch, run, "--out", tmp_path / "kept")


def test_a_run_is_shown_up_to_a_step_finished_or_not(tmp_path):
    run = write_run(tmp_path / "run", 0, range(98), finished=False)
    shown = curves.read_run(run, until=100)
    # Games end at steps 15, 20 ... 100, with scores from 0 to 17; a bin is two steps.
    assert (shown.steps, shown.training, shown.tests) == (100, sum(range(18)) / 18, [])
    assert shown.curve[-1, :3].tolist() == [100, 17, 1]
    with pytest.raises(ValueError, match="has not come to step 501"):
        curves.read_run(run, until=501)
