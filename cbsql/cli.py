"""The command line: ``cbsql --help``."""

import ast
import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from cbsql.deep import SQL
    from cbsql.experiments.spec import RunSpec

app = typer.Typer(
    help="Maximum-entropy reinforcement learning without tuning a temperature.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reproduce = typer.Typer(help="Reproduce the paper's experiments.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")
console = Console()
Games = Annotated[str, typer.Option(help="In place of the paper's, e.g. pong,breakout.")]
Algorithms = Annotated[str, typer.Option(help="Only these columns, e.g. 'sql 100,cbsql'.")]
Seeds = Annotated[int, typer.Option(help="Runs of each; 0 means as many as the paper's.", min=0)]
Frames = Annotated[str, typer.Option(help="Training time, e.g. 500K; else the paper's.")]
Workers = Annotated[
    int, typer.Option(help="Runs at a time; 0 means one per core that has the memory.", min=0)
]
Ray = Annotated[str, typer.Option(help="Address of a Ray cluster to run on, or auto.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list the runs, with their hours.")]
SeedOfTest = Annotated[
    int | None,
    typer.Option("--seed", help="Of the games; else the run's and a million more.", min=0),
]
CheckpointSeconds = Annotated[float, typer.Option(help="Time from one checkpoint to the next.")]
REQUEUE = 75
"""Exit code of a run that was told to stop: EX_TEMPFAIL, by which schedulers know to try again."""


def main() -> None:
    """Entry point of the ``cbsql`` command."""
    app()


@app.command("version")
def show_version() -> None:
    """Print the version."""
    console.print(version("cbsql"))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
) -> None:
    """Reproduce the chain-walk figure, train on CartPole and MinAtar, and make the report page."""
    chain(out=out / "chain")
    train("CartPole-v1", frames="20K", out=out / "cartpole")
    evaluate(out / "cartpole", episodes=20)
    for algorithm in ("dqn", "cbsql"):
        train("MinAtar/Breakout-v1", algorithm, frames="10K", out=out / f"breakout-{algorithm}")
    view(out / "breakout-cbsql", out=out / "view.html", games=20)
    report([out], out=out / "report")


@reproduce.command()
def chain(
    runs: Annotated[int, typer.Option(help="Independent learners per algorithm.")] = 10_000,
    episodes: Annotated[int, typer.Option(help="Training episodes of each learner.")] = 300,
    retreat: Annotated[str, typer.Option(help="Where action 0 leads: back|stay|start.")] = "back",
    end: Annotated[
        str, typer.Option(help="What the fifth step is to the learner: timelimit|terminal.")
    ] = "timelimit",
    kappa: Annotated[float, typer.Option(help="Growth of beta per count.")] = 0.01,
    gamma: Annotated[float, typer.Option(help="Discount factor.")] = 0.99,
    epsilon: Annotated[float, typer.Option(help="Probability of a random action.")] = 0.01,
    learning_rate: Annotated[float, typer.Option(help="Step size of the update.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of all noise and exploration.")] = 0,
    all_schedules: Annotated[
        bool, typer.Option("--all-schedules", help="Add the schedules the paper argues from.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/chain"),
) -> None:
    """Reproduce the chain-walk figure: Q-learning, SQL with three temperatures, and CBSQL."""
    # Imported here so that other commands do not wait for matplotlib.
    from cbsql.experiments.chain import ChainSpec, run_chain, summary, write_chain

    with _input_errors():
        spec = ChainSpec(
            runs=runs,
            episodes=episodes,
            retreat=retreat,
            end=end,
            kappa=kappa,
            gamma=gamma,
            epsilon=epsilon,
            learning_rate=learning_rate,
            seed=seed,
            all_schedules=all_schedules,
        )
    with _output_folder(out) as folder:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as progress:
            task = progress.add_task("chain-walk, runs", total=runs)
            result = run_chain(spec, advance=lambda done: progress.advance(task, done))
        write_chain(result, folder, command=shlex.join(["cbsql", *sys.argv[1:]]))
    console.print(Markdown(summary(result)))
    console.print(f"Took {result.seconds:.1f} s. Look at [bold]{out / 'figure.png'}[/bold].")


def _add_table(name: str, text: str) -> None:
    @reproduce.command(name, help=text)
    def table(
        games: Games = "",
        algorithms: Algorithms = "",
        seeds: Seeds = 0,
        frames: Frames = "",
        workers: Workers = 0,
        ray: Ray = "",
        out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs") / name,
        dry_run: DryRun = False,
        checkpoint_seconds: CheckpointSeconds = 600.0,
    ) -> None:
        from cbsql.experiments.paper import TABLES

        with _input_errors():
            specs = TABLES[name].specs(
                _split(games),
                range(seeds) if seeds else None,
                _parse_number(frames) if frames else None,
                _split(algorithms),
            )
        test_games = TABLES[name].test_games
        _sweep(specs, test_games, workers, ray, out, dry_run, checkpoint_seconds)


def _split(names: str) -> list[str] | None:
    return [name.strip() for name in names.split(",")] if names else None


_add_table("table1", "Make the runs of Table 1: DQN, SQL and CBSQL on six Atari games.")
_add_table("table2", "Make the runs of Table 2: the same on top of Rainbow, on two games.")


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="The file; docs/sweeps.md says how it looks.")],
    workers: Workers = 0,
    ray: Ray = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; else runs/ and the file's name.")
    ] = None,
    dry_run: DryRun = False,
    checkpoint_seconds: CheckpointSeconds = 600.0,
) -> None:
    """Make the runs that a YAML file lists.

    Runs that are done are skipped, unfinished ones go on: give the same command again.
    """
    from cbsql.experiments.spec import read_specs

    with _input_errors():
        specs, test_games = read_specs(file)
    folder = out or Path("runs") / file.stem
    _sweep(specs, test_games, workers, ray, folder, dry_run, checkpoint_seconds)


def _sweep(
    specs: "list[RunSpec]",
    test_games: int,
    workers: int,
    ray: str,
    out: Path,
    dry_run: bool,
    checkpoint_seconds: float,
) -> None:
    # Imported here so that other commands do not wait for torch.
    from cbsql.experiments import board, launch

    command = shlex.join(["cbsql", *sys.argv[1:]])
    plan = launch.plan(specs, out, test_games, command, checkpoint_seconds)
    speeds = board.Speeds(out)
    with _input_errors():
        if ray and workers:
            raise ValueError("--workers is for this machine; on Ray, every core is a worker.")
        if dry_run:
            workers = workers or launch.default_workers(plan.jobs)
            print(board.listing(plan, workers, speeds))
            return
        launcher: launch.Launcher
        if ray:
            launcher = launch.RayLauncher(ray)
        else:
            launcher = launch.LocalLauncher(workers or launch.default_workers(plan.jobs))
        _make_folder(out).rmdir()
    with board.Board(plan, launcher.workers, speeds, console) as shown:
        stopped = launch.sweep(plan.jobs, launcher, shown)
    console.print(shown.summary(), markup=False)
    if stopped:
        console.print(f"{stopped}: saved in [bold]{out}[/bold]. The same command goes on.")
        raise typer.Exit(REQUEUE)
    if shown.failed:
        raise typer.Exit(1)


@app.command()
def train(
    game: Annotated[str, typer.Argument(help="An Atari game, Id-v0 or module:Id-v0 of Gymnasium.")],
    algorithm: Annotated[
        str,
        typer.Option(help="dqn, sql, cbsql, rainbow, rainbow-sql, rainbow-cbsql or munchausen."),
    ] = "cbsql",
    frames: Annotated[
        str, typer.Option(help="Training time, e.g. 500K or 3M; Atari shows 4 frames a step.")
    ] = "",
    beta: Annotated[float, typer.Option(help="Inverse temperature of (rainbow-)sql.")] = 100.0,
    kappa: Annotated[float, typer.Option(help="Beta per count, of (rainbow-)cbsql.")] = 0.01,
    counter: Annotated[
        str, typer.Option(help="Of (rainbow-)cbsql, if not the usual: cts|exact|simhash|coin-flip.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    protocol: Annotated[str, typer.Option(help="How Atari is played: nature|machado.")] = "nature",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="An argument of the algorithm, e.g. learning_rate=1e-4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.")] = None,
    checkpoint_seconds: CheckpointSeconds = 600.0,
) -> None:
    """Train on one game with the paper's settings, or sensible ones where the paper has none.

    A run that was interrupted goes on when the same command is given again.
    """
    from cbsql.checkpoint import CheckpointError
    from cbsql.deep.sql import DivergenceError
    from cbsql.envs.atari import FRAME_SKIP
    from cbsql.experiments import runner
    from cbsql.experiments.spec import RunSpec, preset

    with _input_errors():
        settings = dict(_parse_setting(text) for text in setting or [])
        spec = RunSpec(
            game=game,
            algorithm=algorithm,
            seed=seed,
            beta=beta,
            kappa=kappa,
            counter=counter,
            protocol=protocol,
            settings=settings,
        ).check_effects()
        frames_per_step = FRAME_SKIP if spec.is_atari else 1
        if frames:
            steps = _parse_number(frames) // frames_per_step
            if not steps:
                raise ValueError(f"--frames {frames} is less than a step, of {frames_per_step}.")
            spec = dataclasses.replace(spec, steps=steps)
        # Whatever cannot be built is refused here, before any folder is made.
        with closing(runner.make_env(spec)) as env:
            runner.make_model(spec, env)
    steps = spec.steps or preset(spec).steps
    folder = Path("runs") / spec.name if out is None else out
    with _input_errors():
        _make_folder(folder).rmdir()
        if runner.status(spec, folder) == "finished":
            console.print(f"The run in [bold]{folder}[/bold] is finished; nothing to do.")
            return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),  # in 80 columns the numbers have to fit beside it
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
        console=console,
    ) as progress:
        task = progress.add_task("steps", total=steps, shown="")
        start = time.perf_counter()
        first: list[int] = []

        def report(done: int, figures: dict[str, float]) -> None:
            first[:] = first or [done]
            speed = (done - first[0]) / (time.perf_counter() - start)
            figures = {"steps/s": speed, **figures}
            shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            progress.update(task, completed=done, shown=shown)

        command = shlex.join(["cbsql", *sys.argv[1:]])
        try:
            with _input_errors():
                model = runner.train(spec, folder, command, report, checkpoint_seconds)
        except runner.StoppedError as stop:
            console.print(str(stop), markup=False, soft_wrap=True)
            raise typer.Exit(REQUEUE) from None
        except (CheckpointError, DivergenceError) as error:
            _refuse(str(error), code=1)
    if not model._n_updates:
        console.print(
            f"Nothing was learnt: its {steps} steps ended before learning_starts "
            f"({model.learning_starts}). Give it more --frames.",
            markup=False,
        )
    console.print(f"Trained. Test it with [bold]cbsql evaluate {folder}[/bold].")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    episodes: Annotated[int, typer.Option(help="Games to play.")] = 100,
    seed: SeedOfTest = None,
    video: Annotated[
        Path | None, typer.Option(help="Film the first game: FILE.mp4, for any browser.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Of random actions, instead of the paper's."),
    ] = None,
) -> None:
    """Play test games with what a run has learnt, and write their scores to its test.csv.

    With --seed or --epsilon they are other games than those that runs are compared by, and test.csv
    stays as it is.
    """
    import numpy as np

    from cbsql.checkpoint import only_process
    from cbsql.experiments import runner
    from cbsql.experiments.statistics import LEAST_RUNS, mean_interval

    with _input_errors():
        spec, load = _open_run(run)
        if episodes < 1:
            raise ValueError(f"episodes must be at least 1, not {episodes}.")
        if epsilon is not None and not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must be from 0 to 1, not {epsilon}.")
        if video and video.suffix != ".mp4":
            raise ValueError(f"--video takes the name of an .mp4 file, not {video}.")
        if video:
            _make_folder(video.parent).rmdir()
    kept = seed is None and epsilon is None
    with _input_errors(), only_process(run) if kept else nullcontext():
        seed = runner.seed_of_test(spec) if seed is None else seed
        with Progress(console=console, transient=True) as progress:
            games = progress.add_task(f"{spec.game}, test games", total=episodes)
            played = runner.evaluate(
                spec, load(), episodes, seed, video, lambda: progress.advance(games), epsilon
            )
        if kept:
            runner.write_test(run, played)
    scores = np.array([episode.score for episode in played if episode.kind == "game"])
    shown = f"{spec.game}, {spec.algorithm}: mean {scores.mean():.2f} over "
    shown += "one game" if episodes == 1 else f"{episodes} games"
    if episodes >= LEAST_RUNS:
        low, high = mean_interval(scores)
        shown += (
            f", standard deviation {scores.std(ddof=1):.2f}, "
            f"95% interval of the mean [{low:.2f}, {high:.2f}]"
        )
    console.print(shown, markup=False)
    if video:
        console.print(f"The first game is in [bold]{video}[/bold].")


@app.command()
def bench(
    part: Annotated[
        list[str] | None, typer.Option(help="loops|growth|batches|pair; all if none is given.")
    ] = None,
    game: Annotated[
        list[str] | None,
        typer.Option(help="Of loops: breakout, MinAtar/Breakout-v1 or CartPole-v1."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Torch threads.", min=1)] = 2,
    blocks: Annotated[int, typer.Option(help="Turns that each figure is a median of.", min=1)] = 9,
    out: Annotated[Path | None, typer.Option(help="A file to write the report to, too.")] = None,
) -> None:
    """Measure the speed of training beside Stable-Baselines3's, in one run."""
    from cbsql.experiments import bench as benchmark

    chosen = {"--part": (part, benchmark.PARTS), "--game": (game, tuple(benchmark.BLOCK_STEPS))}
    with _input_errors():
        for option, (given, known) in chosen.items():
            for name in given or ():
                if name not in known:
                    raise ValueError(f"{option} takes {', '.join(known)}, not {name!r}.")
        parts, games = (list(given or known) for given, known in chosen.values())
        if out:
            _make_folder(out.parent).rmdir()
    lines = []
    for line in benchmark.report(parts, games, threads, blocks):
        lines.append(line)
        print(line, flush=True)
    if out:
        out.write_text("\n".join(lines) + "\n")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Runs or results, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("report"),
) -> None:
    """Make one page of everything below some folders: tables, curves, statistics, every run."""
    from cbsql.experiments.report.collect import collect
    from cbsql.experiments.report.page import make_page, make_tables

    with _input_errors():
        found = collect(folders)
        if not found.results and not found.chains:
            folder, reason = found.unread[0]
            raise ValueError(f"There is nothing to report: {folder} {reason}.")
    with _output_folder(out) as staging:
        (staging / "index.html").write_text(make_page(found, out), encoding="utf-8")
        (staging / "tables.md").write_text(make_tables(found), encoding="utf-8")
    for folder, reason in found.unread:
        console.print(f"Left out: {folder} {reason}.", markup=False, soft_wrap=True)
    console.print(f"Look at [bold]{out / 'index.html'}[/bold].")


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="The page to write: FILE.html.")] = Path("view.html"),
    seed: SeedOfTest = None,
    steps: Annotated[int, typer.Option(help="Agent steps to show at most.")] = 2_000,
    games: Annotated[int, typer.Option(help="Show the best of so many games.", min=1)] = 1,
) -> None:
    """Play a test game and make a page that shows what the agent saw, counted and trusted."""
    from cbsql.checkpoint import write_file
    from cbsql.experiments.runner import seed_of_test
    from cbsql.experiments.view import make_view, play_best

    with _input_errors():
        spec, load = _open_run(run)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}.")
        if out.suffix != ".html":
            raise ValueError(f"--out takes the name of an .html file, not {out}.")
        _make_folder(out.parent).rmdir()
        seed = seed_of_test(spec) if seed is None else seed
        game = play_best(spec, load(), seed, steps, games)
    write_file(out, make_view(game).encode())
    console.print(f"Look at [bold]{out}[/bold].")


def _open_run(run: Path) -> "tuple[RunSpec, Callable[[], SQL]]":
    """What was run in a folder, and a function that loads what was learnt."""
    from cbsql.experiments.spec import RunSpec

    if not (run / "run.json").is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no run.json.")
    if (run / "curves.csv").is_file():
        raise ValueError(f"{run} is a chain-walk experiment, which leaves no model.")
    if not (run / "model.zip").is_file():
        raise ValueError(f"The run in {run} has no model.zip: it is not finished yet.")
    try:
        record = json.loads((run / "run.json").read_text())
        spec = RunSpec(**{**record["spec"], "settings": {}})
        if not record["finished"]:
            console.print(f"The run in {run} is not finished: this is where it was stopped.")
    except (KeyError, TypeError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{run / 'run.json'} is damaged: {error}.") from None
    return spec, lambda: spec.learner.load(run / "model.zip", buffer_size=1)


def _parse_number(text: str) -> int:
    """The number that 3M, 500K or 1_000 means."""
    factor = {"K": 1_000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    try:
        number = int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise ValueError(f"{text!r} is not a positive number such as 1000, 500K or 3M.")
    return number


def _parse_setting(text: str) -> tuple[str, Any]:
    """Name and value of name=value, the value being a word or a Python literal."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError, TypeError):
        if value.isidentifier():
            return name, value
        raise ValueError(f"--set takes name=value, such as batch_size=64, not {text!r}.") from None


@contextmanager
def _input_errors() -> Iterator[None]:
    """Turn what a check of the arguments says into one line and exit code 2, of a disk into 1."""
    from gymnasium.error import Error

    try:
        yield
    # SB3 refuses with assertions, Gymnasium with errors of its own.
    except (ValueError, MemoryError, AssertionError, Error) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}." if error.filename else str(error), code=1)


@contextmanager
def _output_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to whose files appear in ``folder`` all at once, when all is well."""
    with _input_errors():
        staging = _make_folder(folder)
    try:
        yield staging
        for file in staging.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(staging)


def _make_folder(folder: Path) -> Path:
    """Make sure that a folder can be written, and return an empty one in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    except OSError as error:
        raise ValueError(
            f"The output folder {folder} cannot be written: {error.strerror}."
        ) from None


def _refuse(message: str, code: int = 2) -> NoReturn:
    Console(stderr=True).print(
        f"cbsql: {message}", style="red", soft_wrap=True, highlight=False, markup=False
    )
    raise typer.Exit(code)
