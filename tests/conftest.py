"""Set up before any test module is imported."""

import hashlib
import os
import tempfile
from pathlib import Path

# Numba's cache looks only at the file of the compiled function, not at the functions it calls in
# other files (numba issue 8851). A cache folder per state of the sources keeps tests off old code.
_sources = sorted((Path(__file__).parents[1] / "cbsql").rglob("*.py"))
_digest = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:16]
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"cbsql-numba-{os.getuid()}-{_digest}")
)
