import re
import runpy
from pathlib import Path

import numpy as np

from cbsql.temperature import Counter

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_counter.py"


def test_the_example_plugs_in_and_trusts_states_by_their_updates(capsys):
    names = runpy.run_path(str(EXAMPLE), run_name="__main__")
    start, falling = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out))
    assert start > falling
    counter = names["GridCounter"](cell=0.5)
    assert isinstance(counter, Counter)
    counter.update(np.array([[0.1, 0.1], [0.2, 0.2], [-0.1, 0.1]]))
    fresh = names["GridCounter"](cell=0.5)
    fresh.load_state_dict(counter.state_dict())
    assert fresh.count(np.array([[0.3, 0.3], [-0.3, 0.3], [9.0, 9.0]])).tolist() == [2, 1, 0]
