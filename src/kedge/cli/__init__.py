"""The `kedge` command."""
