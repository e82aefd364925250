"""The page of one game: what was recorded, and what a browser shows of it."""

import importlib.util
import json
from contextlib import closing

import numpy as np
import pytest
from browser import open_browser
from typer.testing import CliRunner

from cbsql.cli import app
from cbsql.counts import CTS
from cbsql.experiments.runner import evaluate, make_env, train
from cbsql.experiments.spec import RunSpec
from cbsql.experiments.view import NATS_PER_UNIT, make_view, play, play_best

SMALL = {"buffer_size": 1000, "learning_starts": 10}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def freeway(tmp_path_factory):
    """A short CBSQL run, a game of it, and the game's page."""
    folder = tmp_path_factory.mktemp("freeway")
    spec = RunSpec("freeway", "cbsql", steps=60, settings=SMALL)
    game = play(spec, train(spec, folder), seed=5, steps=40)
    page = folder / "view.html"
    page.write_text(make_view(game))
    return folder, game, page


def test_what_is_recorded_is_what_happens(freeway):
    _, game, _ = freeway
    assert len(game.steps) == len(game.pictures) == len(game.symbols) == 40
    assert game.score is None  # a game of Freeway has 2,000 steps
    assert game.actions == ["noop", "up", "down"]
    with closing(make_env(game.spec, seed=5)) as env:
        observation = env.reset()
        for step, picture, symbols in zip(game.steps, game.pictures, game.symbols, strict=True):
            newest = observation[0, -1].astype(float)
            assert (picture[..., 0] == newest).all()
            areas = newest.reshape(42, 2, 42, 2).mean((1, 3))
            assert (symbols == np.floor(np.floor(areas + 0.5) / 32)).all()
            q, beta = np.array(step["q"]), step["beta"]
            assert step["explored"] or step["action"] == q.argmax()
            assert beta == 0.01 * step["count"]
            weights = np.exp(beta * (q - q.max()))
            assert step["policy"] == pytest.approx(weights / weights.sum())
            observation, *_ = env.step(np.array([step["action"]]))


def test_an_environment_that_cannot_draw_itself_has_no_pictures(tmp_path):
    spec = RunSpec("cbsql/ChainWalk-v0", steps=40, settings=SMALL)
    game = play(spec, train(spec, tmp_path), seed=3, steps=10)
    assert game.steps
    assert game.pictures == []


def test_noise_is_not_shown_as_it_is_not_played(tmp_path):
    spec = RunSpec("MinAtar/Breakout-v1", "rainbow-cbsql", steps=60, settings=SMALL)
    game = play(spec, train(spec, tmp_path), seed=5, steps=60)
    assert all(step["action"] == np.argmax(step["q"]) for step in game.steps)


def test_the_best_of_several_games_is_shown(tmp_path):
    spec = RunSpec("CartPole-v1", steps=60, settings=SMALL)
    model = train(spec, tmp_path)
    scores = [evaluate(spec, model, 1, seed)[0].score for seed in range(7, 17)]
    assert len(set(scores)) > 1
    game = play_best(spec, model, seed=7, steps=500, games=10)
    assert (game.score, game.seed) == (max(scores), 7 + int(np.argmax(scores)))
    assert "The best of 10 test games" in make_view(game)


def test_surprise_is_that_of_the_density_model(freeway):
    folder, game, _ = freeway
    model = game.spec.learner.load(folder / "model.zip", buffer_size=1)
    density = model.temperature.counter.density
    assert isinstance(density, CTS)
    log_rho, _ = density.log_prob(np.stack(game.symbols))
    assert [step["surprise"] for step in game.steps] == pytest.approx(-log_rho)
    shown = np.stack(game.surprises).sum((1, 2)) * NATS_PER_UNIT
    assert shown == pytest.approx(-log_rho, abs=42 * 42 * NATS_PER_UNIT / 2)


def colours(page, canvas):
    """What a canvas shows, (height, width, 4)."""
    size, values = page.evaluate(
        f"(() => {{ const c = document.getElementById('{canvas}');"
        "const image = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        "return [[c.height, c.width, 4], [...image.data]]; })()"
    )
    return np.array(values).reshape(size)


def test_the_scrubber_moves_everything(freeway, browser):
    _, game, path = freeway
    page = browser(path)
    page.wait_for("document.documentElement.dataset.ready")
    assert page.complaints == []
    assert page.requests == [path.as_uri()]
    for step in (0, 7, 39, 12):  # forwards and backwards
        page.evaluate(
            f"(() => {{ const s = document.getElementById('scrubber'); s.value = {step};"
            "s.dispatchEvent(new Event('input')); })()"
        )
        assert (colours(page, "picture")[..., :3] == game.pictures[step]).all()
        assert page.evaluate("document.getElementById('at').textContent") == (
            f"step {step + 1} of 40"
        )
        policy = page.evaluate(
            "[...document.querySelectorAll('#values tbody tr')]"
            ".map((row) => +row.cells[2].textContent)"
        )
        assert policy == pytest.approx(game.steps[step]["policy"], abs=0.0051)
        taken = page.evaluate("document.querySelector('#values .taken th').textContent")
        assert taken == game.actions[game.steps[step]["action"]]
    # Where the model is more surprised the picture is redder, against its grey without surprise.
    hot = colours(page, "symbols").astype(int)
    page.click("#heat")
    grey = colours(page, "symbols").astype(int)
    assert (grey[..., 0] == np.rint(game.symbols[12] / 7 * 255)).all()
    red = hot[..., 0] - hot[..., 2]
    units = game.surprises[12]
    assert red[units > 48].min() > red[units < 4].max()


def test_playback_by_mouse_and_keyboard(freeway, browser):
    _, game, path = freeway
    page = browser(path)
    page.wait_for("document.documentElement.dataset.ready")
    step = "Number(document.getElementById('scrubber').value)"
    page.click("#forward")
    page.click("#forward")
    page.click("#back")
    assert page.evaluate(step) == 1
    page.press("ArrowRight")  # the button that was clicked has no use for it
    assert page.evaluate(step) == 2
    page.evaluate("document.activeElement.blur()")
    page.press(" ")
    page.wait_for(f"{step} > 4")
    page.press(" ")
    stopped = page.evaluate(step)
    assert page.evaluate(f"new Promise((go) => setTimeout(() => go({step}), 300))") == stopped
    page.click("#play")
    assert page.evaluate("document.getElementById('play').textContent") == "pause"
    page.wait_for(f"{step} === 39")  # the end, where it stops
    page.wait_for("document.getElementById('play').textContent === 'play'")
    betas = [one["beta"] for one in game.steps]
    page.click("#most")
    assert betas[page.evaluate(step)] == max(betas)
    page.move("#value-line svg", x=0.999, click=True)
    assert page.evaluate(step) == 39
    assert page.complaints == []


@pytest.mark.parametrize(
    ("game", "algorithm", "pictures"),
    [
        ("MinAtar/Breakout-v1", "cbsql", True),
        ("MinAtar/Breakout-v1", "dqn", True),
        ("CartPole-v1", "cbsql", importlib.util.find_spec("pygame") is not None),
        ("CartPole-v1", "rainbow-sql", importlib.util.find_spec("pygame") is not None),
        ("freeway", "rainbow-cbsql", True),
    ],
)
def test_every_kind_of_run_has_a_page(game, algorithm, pictures, tmp_path, browser):
    out = tmp_path / "view.html"
    train(RunSpec(game, algorithm, steps=40, settings=SMALL), tmp_path)
    arguments = ["view", str(tmp_path), "--out", str(out), "--steps", "30"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    for look in ({"width": 390, "height": 844, "dark": True}, {}):
        page = browser(out, **look)
        page.wait_for("document.documentElement.dataset.ready")
        assert page.complaints == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    visible = "document.getElementById('{}').checkVisibility()"
    assert page.evaluate(visible.format("picture")) == pictures
    assert page.evaluate(visible.format("symbols")) == (game == "freeway")
    assert page.evaluate(visible.format("least")) == algorithm.endswith("cbsql")
    rows = page.evaluate("document.getElementById('observation').rows.length")
    assert rows == (4 if game == "CartPole-v1" else 0)
    trust = page.evaluate("document.getElementById('trust').textContent")
    expected = {"dqn": "β = ∞", "rainbow-sql": "β = 100"}.get(algorithm, "β = ")
    assert trust.startswith(expected)
    assert ("n = " in trust) == algorithm.endswith("cbsql")


def test_bad_input_is_one_sentence_and_writes_nothing(freeway, tmp_path):
    folder, _, _ = freeway
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text((folder / "run.json").read_text())
    (tmp_path / "file").write_text("in the way")
    out = ("--out", str(tmp_path / "view.html"))
    cases = [
        ((str(tmp_path), *out), "is not the folder of a run"),
        ((str(damaged), *out), "has no model.zip: it is not finished yet"),
        ((str(folder), "--steps", "0", *out), "steps must be at least 1, not 0"),
        ((str(folder), "--out", "view.png"), "takes the name of an .html file, not view.png"),
        ((str(folder), "--out", str(tmp_path / "file" / "view.html")), "cannot be written"),
    ]
    for arguments, named in cases:
        refused(arguments, named)
    (damaged / "model.zip").write_bytes((folder / "model.zip").read_bytes()[:1000])
    refused((str(damaged), *out), "model.zip")
    (damaged / "run.json").write_text(json.dumps({"spec": {"color": "red"}}))
    refused((str(damaged), *out), "run.json is damaged")
    assert {path.name for path in tmp_path.iterdir()} == {"damaged", "file"}


def refused(arguments, named):
    done = CliRunner().invoke(app, ["view", *arguments])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert named in " ".join(done.stderr.split())
