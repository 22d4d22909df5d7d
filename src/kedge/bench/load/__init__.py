"""Teams of agents under load, and long runs."""
