"""`python -m kedge`: the command without its script"""

from kedge.cli.main import app

if __name__ == "__main__":
    app()
