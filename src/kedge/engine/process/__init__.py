"""An engine in a process of its own, so that it shares no interpreter lock with the program that uses it."""
