"""cbsql."""
