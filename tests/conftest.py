"""Set up before any test module is imported."""

import hashlib
import os
import tempfile
from pathlib import Path

from hypothesis import settings

# Numba's cache looks only at the file of the compiled function, not at the functions it calls in
# other files (numba issue 8851). A cache folder per state of the sources keeps tests off old code.
_sources = sorted((Path(__file__).parents[1] / "cbsql").rglob("*.py"))
_digest = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:16]
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"cbsql-numba-{os.getuid()}-{_digest}")
)

# Several test processes run side by side: more threads than cores would slow all of them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: compilation and a busy machine are no failures. CI draws the same examples always.
settings.register_profile("cbsql", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("cbsql")
