"""The scheduler process: the bridge between `sched` and an engine."""
