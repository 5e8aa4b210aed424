"""Long runs that prove what is promised under load, each with a bound: `python -m tests.soak`."""
