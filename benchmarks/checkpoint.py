"""What a checkpoint of an Atari run costs, by the number of stored frames.

    python benchmarks/checkpoint.py [--frames 100000]

A CBSQL learner's replay is filled with real frames (Seaquest, random play, 8 games at a time) and
checkpointed each time as much is new as a run stores in ten minutes, the default interval.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from cbsql.checkpoint import Checkpoints, Ring
from cbsql.deep.state import training_state
from cbsql.envs import make_atari_vec_env
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import make_model
from cbsql.experiments.spec import RunSpec

INTERVAL_SECONDS = 600
STEPS_PER_SECOND = 60  # of training with one thread on this class of machine
N_ENVS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="to store in all")
    frames = parser.parse_args().frames
    record = provenance()
    env = make_atari_vec_env("seaquest", n_envs=N_ENVS, seed=0)
    model = make_model(RunSpec("seaquest", settings={"buffer_size": frames}), env)
    buffer = model.replay_buffer
    rng = np.random.default_rng(0)
    model._setup_learn(frames)
    obs = env.reset()
    interval = INTERVAL_SECONDS * STEPS_PER_SECOND
    print("| stored frames | seconds | MB written | share of the time | MB on disk |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        checkpoints = Checkpoints(Path(name))
        for step in range(N_ENVS, frames + 1, N_ENVS):
            actions = rng.integers(env.action_space.n, size=N_ENVS)
            new_obs, rewards, dones, infos = env.step(actions)
            last = new_obs.copy()
            for i in np.flatnonzero(dones):
                last[i] = infos[i]["terminal_observation"]
            buffer.add(obs, last, actions, rewards, dones, infos)
            obs = new_obs
            model.temperature.update(obs)
            if step % interval < N_ENVS or step == frames:
                rings = {key: Ring(*ring) for key, ring in buffer.rings().items()}
                start = time.perf_counter()
                written = checkpoints.save(f"{step:012d}", {"model": training_state(model)}, rings)
                seconds = time.perf_counter() - start
                on_disk = sum(path.stat().st_size for path in Path(name).iterdir())
                share = f"{seconds / INTERVAL_SECONDS:.2%}"
                row = (f"{step:,}", f"{seconds:.1f}", f"{written / 1e6:.0f}", share)
                print(f"| {' | '.join(row)} | {on_disk / 1e6:.0f} |", flush=True)
    env.close()
    print(f"\n{record['machine']}, commit {record['commit']}\n")


if __name__ == "__main__":
    main()
