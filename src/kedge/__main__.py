"""`python -m kedge`"""

from kedge.cli.main import app

if __name__ == "__main__":
    app()
