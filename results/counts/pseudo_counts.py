"""Pseudo-counts of random play in the paper's six games, and what the model has learnt of them.

    python results/counts/pseudo_counts.py

Writes pseudo_counts.csv, pseudo_counts.png and run.json beside this file, and the picture of model
samples in docs/images. Each game is played at random in 8 environments; every batch of 32
observations is counted before it is learnt. Takes about three minutes.
"""

import csv
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import ale_py
import matplotlib.pyplot as plt
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces

from cbsql.counts import CTS, PixelCounter

HERE = Path(__file__).parent
SAMPLES = HERE.parents[1] / "docs" / "images" / "cts_samples.png"
GAMES = ("breakout", "freeway", "pong", "qbert", "seaquest", "space_invaders")
SAMPLED = ("qbert", "seaquest")
FRAMES = 20_000  # agent steps of 4 emulator frames each, one newest frame per step
ENVIRONMENTS, BATCH, SEED = 8, 32, 0
SPACE = spaces.Box(0, 255, (4, 84, 84), np.uint8)


def title(game: str) -> str:
    """The name of a game as people write it."""
    return {"qbert": "Q*bert"}.get(game, game.replace("_", " ").title())


def play(game: str) -> tuple[list[dict[str, float]], PixelCounter, np.ndarray]:
    """Rows of the table for one game, the counter after it, and some of the symbols it learnt."""
    env = AtariVectorEnv(game, num_envs=ENVIRONMENTS)
    rng = np.random.default_rng(SEED)
    counter = PixelCounter(CTS((42, 42)), SPACE)
    start, _ = env.reset(seed=SEED)
    first = start[:1].copy()  # the first observation of the first game
    marks = np.unique(np.geomspace(BATCH, FRAMES, 40).astype(int) // BATCH * BATCH)
    rows, counts, kept = [], [], []
    for learnt in range(BATCH, FRAMES + 1, BATCH):
        actions = rng.integers(
            env.single_action_space.n, size=(BATCH // ENVIRONMENTS, ENVIRONMENTS)
        )
        batch = np.concatenate([env.step(action)[0] for action in actions])
        counts.append(counter.count(batch))
        counter.update(batch)
        kept.append(batch[rng.integers(BATCH)])
        if learnt in marks:  # quantiles over all batches since the last mark
            low, median, high = np.quantile(np.concatenate(counts), [0.1, 0.5, 0.9])
            opening = float(counter.count(first)[0])
            row = {"frames_learnt": learnt, "p10": low, "median": median, "p90": high}
            rows.append(row | {"first_frame": opening})
            counts = []
    return rows, counter, counter.symbols(np.stack(rng.permutation(kept)[:4]))


def draw_counts(table: dict[str, list[dict[str, float]]]) -> None:
    """One panel for each game: pseudo-counts over frames learnt."""
    fig, axes = plt.subplots(
        2, 3, figsize=(11, 6.2), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (game, rows) in zip(axes.flat, table.items(), strict=True):
        x = [row["frames_learnt"] for row in rows]
        low, median, high, first = (
            np.maximum([row[key] for row in rows], 1e-4)
            for key in ("p10", "median", "p90", "first_frame")
        )
        ax.fill_between(x, low, high, color="#4c72b0", alpha=0.2, lw=0, label="10% to 90%")
        ax.plot(x, median, color="#4c72b0", lw=2, label="median of new frames")
        ax.plot(x, first, color="#c44e52", lw=1.5, ls="--", label="first frame of the game")
        ax.plot(x, x, color="0.6", lw=1, ls=":", label="$n$ = frames learnt")
        ax.set(xscale="log", yscale="log", title=title(game), ylim=(1e-4, 1e5))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("frames learnt")
    for ax in axes[:, 0]:
        ax.set_ylabel("pseudo-count $n$")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    fig.savefig(HERE / "pseudo_counts.png", dpi=130)
    plt.close(fig)


def draw_samples(models: dict[str, tuple[PixelCounter, np.ndarray]]) -> None:
    """Real frames beside frames drawn from the model, one row for each game."""
    rng = np.random.default_rng(SEED)
    columns = len(next(iter(models.values()))[1])
    fig, axes = plt.subplots(
        len(models), 2 * columns + 1, figsize=(12, 3.4), layout="constrained",
        width_ratios=[1] * columns + [0.15] + [1] * columns,
    )  # fmt: skip
    for line, (game, (counter, frames)) in zip(axes, models.items(), strict=True):
        drawn = [counter.density.sample(rng) for _ in range(columns)]
        for ax, image in zip(np.delete(line, columns), [*frames, *drawn], strict=True):
            ax.imshow(image, cmap="gray", vmin=0, vmax=counter.density.levels - 1)
            ax.set(xticks=[], yticks=[])
        line[columns].axis("off")
        line[0].set_ylabel(title(game), fontsize=12)
    axes[0, 0].set_title("real frames", loc="left", fontsize=12)
    axes[0, columns + 1].set_title("drawn from the model", loc="left", fontsize=12)
    SAMPLES.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(SAMPLES, dpi=110)
    plt.close(fig)


def main() -> None:
    """Play, count, and write all files."""
    began = time.time()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    table, models = {}, {}
    for game in GAMES:
        table[game], *models[game] = play(game)
        print(f"{title(game)}: median pseudo-count {table[game][-1]['median']:.2f}", flush=True)
    with (HERE / "pseudo_counts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["game", *table[GAMES[0]][0]])
        writer.writeheader()
        for game, rows in table.items():
            for row in rows:
                values = {key: f"{value:.6g}" for key, value in row.items()}
                writer.writerow({"game": game} | values)
    draw_counts(table)
    draw_samples({game: models[game] for game in SAMPLED})
    run = {
        "command": "python results/counts/pseudo_counts.py",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
        "frames_per_game": FRAMES,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ale_py": ale_py.__version__,
        },
        "wall_time_seconds": round(time.time() - began),
    }
    (HERE / "run.json").write_text(json.dumps(run, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
