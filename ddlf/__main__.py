"""``python -m ddlf``: the same as ``ddlf``, where that is not on the path, or another Python's is."""

from ddlf.cli.main import command

if __name__ == "__main__":
    command()
