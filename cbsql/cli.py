"""The command line: ``cbsql --help``."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

app = typer.Typer(
    help="Maximum-entropy reinforcement learning without tuning a temperature.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reproduce = typer.Typer(help="Reproduce the paper's experiments.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")
console = Console()


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
    """Reproduce the paper's chain-walk figure with its own settings."""
    chain(out=out / "chain")


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
    # Imported here so that --help and bad options answer without loading torch.
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


@contextmanager
def _input_errors() -> Iterator[None]:
    """Turn what a check of the arguments says into one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        _refuse(str(error))


@contextmanager
def _output_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to whose files appear in ``folder`` all at once, when all is well."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    except OSError as error:
        _refuse(f"The output folder {folder} cannot be written: {error.strerror}.")
    try:
        yield staging
        for file in staging.iterdir():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(staging)


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(f"cbsql: {message}", style="red", soft_wrap=True, highlight=False)
    raise typer.Exit(2)
