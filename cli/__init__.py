"""The `millstream` command: reads settings, runs one role, or supervises all of them."""
